"""Train a GPT on text, on as many ranks as you like, under any strategy.

    python examples/train_gpt.py --size nano --steps 100
    roundelay run -n 4 examples/train_gpt.py --strategy ddp --size small
    roundelay run -n 4 examples/train_gpt.py --mesh dp=2,tp=2 --strategy zero2
    roundelay run -n 4 examples/train_gpt.py --mesh dp=2,cp=2 --context ring
    roundelay run -n 4 examples/train_gpt.py --mesh pp=4 --pipeline 1f1b --size small

Writes the loss curve to out/loss.svg, and ends with a sample of what the model has learnt and with
the ledger: what each rank should have held and sent, and what it did.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from gpt import ALONE, GPT, SIZES, Attention, Text, count, loss_of, mesh_of, read_text
from gpt_pipeline import train_pipeline
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import roundelay as rd
from roundelay.view.chart import Axis, chart


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="ddp", help="ddp, ps, ps-async, ps-ssp, zero1 …")
    parser.add_argument("--mesh", default="", help="axes of ranks: dp=2,tp=2 or dp=2,cp=2")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--size", default="nano", choices=SIZES)
    parser.add_argument("--steps", type=count, default=200)
    parser.add_argument("--batch", type=count, default=24, help="rows of all ranks together")
    parser.add_argument("--micro-batch", type=count, default=None, help="rows at a time on a rank")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--text", default=None, help="a file to learn from")
    parser.add_argument("--save", type=Path, default=None, help="folder for a checkpoint")
    parser.add_argument("--resume", type=Path, default=None, help="go on from a checkpoint")
    parser.add_argument("--context", default="ring", choices=["ring", "ulysses"],
                        help="how attention goes over the axis cp")  # fmt: skip
    parser.add_argument("--pipeline", default=None, help="gpipe, 1f1b, zb-h1 …: stages over pp")
    parser.add_argument("--micro-batches", type=count, default=4, help="of a pipeline's batch")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for loss.svg")
    return parser.parse_args()


@dataclass(frozen=True)
class Sequences:
    """How sequences are divided along the axis cp."""

    comm: rd.Communicator | None
    method: str
    layout = "zigzag"

    def attention(self) -> Attention:
        """Return what goes over all ranks of the axis."""
        if self.comm is None:
            return ALONE
        return partial(
            rd.attention, comm=self.comm, method=self.method, layout=self.layout, causal=True
        )

    def loss(self, model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's part of the loss: means of its tokens, by how many these are."""
        if self.comm is None:
            return loss_of(model, tokens, targets)
        length = tokens.shape[1]
        mine, right = (
            rd.shard_sequence(x, self.comm, layout=self.layout) for x in (tokens, targets)
        )
        places = rd.sequence_positions(length, self.comm, layout=self.layout)
        weight = mine.shape[1] * self.comm.size / length
        return loss_of(model, mine, right, places) * weight


def main() -> None:
    """Train, write, and account for it."""
    options = arguments()
    if options.pipeline is not None:
        train_pipeline(options)
        return
    comm = rd.init()
    mesh = mesh_of(options.mesh, comm, ("dp", "cp", "tp"))
    sequences = Sequences(mesh["cp"] if mesh.size("cp") > 1 else None, options.context)
    torch.manual_seed(0)
    size = SIZES[options.size]
    model = GPT(size, attention=sequences.attention())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    model, optimizer = rd.prepare(
        model, optimizer, strategy=options.strategy, precision=options.precision, mesh=mesh,
        plan="gpt" if "tp" in mesh else None,
    )  # fmt: skip
    data = Text(read_text(options.text), size.context)
    batches = rd.loader(
        data, options.batch, mesh=mesh, model=model, micro_batch=options.micro_batch, drop_last=True
    )
    losses: list[float] = []
    if options.resume is not None:
        before = rd.load(options.resume, model, optimizer).extra
        losses = before["losses"]
        batches.load_state_dict(before["batches"])
    train(model, optimizer, batches, sequences, comm, options, losses)
    if options.save is not None:
        extra = {"batches": batches.state_dict(), "losses": losses}
        rd.save(options.save, model, optimizer, extra=extra)
    book = rd.ledger(model)
    optimizer.zero_grad()
    state = rd.full_state_dict(model)
    if comm.rank == 0:
        finish(size, state, losses, book, options.out)


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: rd.Loader,
    sequences: Sequences, comm: rd.Communicator, options: argparse.Namespace, losses: list[float],
) -> None:  # fmt: skip
    """Step until there are so many losses, as this rank saw them."""
    parts, before = 0.0, len(losses)
    if before >= options.steps:
        sys.exit(f"{options.resume} has {before} steps already, and --steps is {options.steps}.")
    with progress(options.steps - before, shown=comm.rank == 0) as show:
        began, talked = time.perf_counter(), comm.seconds
        for tokens, targets in forever(batches):
            if batches.first_of_step:
                optimizer.zero_grad()
                parts = 0.0
            loss = sequences.loss(model, tokens, targets)
            optimizer.scale(loss).backward()
            parts += loss.item() / batches.plan.accumulation
            if not batches.last_of_step:
                continue
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            losses.append(parts)
            took = time.perf_counter() - began
            words = (len(losses) - before) * options.batch * tokens.shape[1] / took
            share = (comm.seconds - talked) / took
            show(
                f"loss {parts:.3f}  {words:,.0f} tokens/s  {share:.0%} of the time in communication"
            )
            if len(losses) == options.steps:
                break


def forever(batches: rd.Loader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Go through the text again and again."""
    while True:
        yield from batches


@contextlib.contextmanager
def progress(steps: int, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """Show a bar in a terminal, or a line every now and then where output is piped."""
    if not shown:
        yield lambda _: None
    elif not sys.stdout.isatty():
        yield Lines(steps).show
    else:
        columns = (TextColumn("training"), BarColumn(24), MofNCompleteColumn(),
                   TimeRemainingColumn(), TextColumn("{task.description}"))  # fmt: skip
        with Progress(*columns) as bar:
            task = bar.add_task("", total=steps)
            yield lambda text: bar.update(task, advance=1, description=text)


class Lines:
    """Progress in lines, two seconds apart."""

    def __init__(self, steps: int) -> None:
        self.steps, self.step, self.last = steps, 0, time.monotonic()

    def show(self, text: str) -> None:
        """Count a step, and say where we are if it is time."""
        self.step += 1
        if self.step == self.steps or time.monotonic() - self.last > 2:  # noqa: PLR2004 - seconds
            self.last = time.monotonic()
            print(f"step {self.step:4} of {self.steps}  {text}", flush=True)


def finish(
    size: object, state: dict[str, torch.Tensor], losses: list[float], book: rd.Ledger, out: Path
) -> None:
    """Show what was learnt and what it cost."""
    out.mkdir(parents=True, exist_ok=True)
    curve = list(enumerate(losses, start=1))
    picture = chart(
        {"loss": curve}, title="GPT on text", across=Axis("step"), up=Axis("loss, nats per byte")
    )
    (out / "loss.svg").write_text(picture, encoding="utf-8")
    (out / "ledger.json").write_text(book.to_json(), encoding="utf-8")
    alone = GPT(size)  # type: ignore[arg-type]
    alone.load_state_dict(state)
    sample = alone.write(b"def ", 160).decode("utf-8", "replace")
    few = max(1, len(losses) // 10)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    print(f"loss {first:.3f} → {last:.3f} in {len(losses)} steps; curve in {out / 'loss.svg'}")
    print(f"\nIt writes:\n{sample}\n\n{book}")


if __name__ == "__main__":
    main()
