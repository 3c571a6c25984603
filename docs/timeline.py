"""Draw the timeline of one backward pass: docs/measured/ddp_timeline.svg, from a real run."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from gpt import GPT, SIZES, Text, loss_of, read_text  # noqa: E402 - the example's model

import roundelay as rd  # noqa: E402 - after the path
from roundelay.view.timeline import Lane, timeline  # noqa: E402

STEPS = 5


def measure(comm: rd.Communicator, model: GPT, data: Text) -> str:
    """Take a few steps, and draw the last backward pass as this rank saw it."""
    optimizer = torch.optim.AdamW(model.parameters())
    chosen = rd.Ddp(bucket_bytes=2 << 20)
    _, optimizer = rd.prepare(model, optimizer, strategy=chosen, comm=comm)
    batches = rd.loader(data, 8, comm=comm, drop_last=True, quiet=True)
    for step, (tokens, targets) in enumerate(batches):
        optimizer.zero_grad()
        loss_of(model, tokens, targets).backward()  # type: ignore[no-untyped-call]
        if step == STEPS:
            break
        optimizer.step()
    seen = optimizer.run.state.timeline()
    lanes = [Lane(span.nbytes, span.full, span.began, span.ended) for span in seen.spans]
    title = (
        f"One backward pass on 2 ranks: {seen.hidden:.0%} of communication overlaps with backward"
    )
    return timeline(lanes, began=seen.began, ended=seen.ended, title=title)


def main() -> None:
    """Write the picture."""
    torch.set_num_threads(1)
    size = SIZES["small"]
    pictures = rd.run(measure, 2, args=(GPT(size), Text(read_text(None), size.context)))
    (ROOT / "docs/measured/ddp_timeline.svg").write_text(pictures[0], encoding="utf-8")


if __name__ == "__main__":
    main()
