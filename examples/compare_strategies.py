"""Train the same GPT under every strategy there is, and set them side by side.

    python examples/compare_strategies.py --ranks 4

One table (loss, step time, bytes held and sent: predicted / measured), one plot: strategies.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, SIZES, Text, loss_of, read_text
from rich.console import Console
from rich.table import Table

import roundelay as rd
from roundelay.training.prepare import known_strategies
from roundelay.view.chart import Axis, chart


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--size", default="nano", choices=SIZES)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=24, help="rows of all ranks together")
    parser.add_argument(
        "--bucket", type=int, default=64 << 10,
        help="bytes of a bucket: well below those of the model, as with real ones",
    )  # fmt: skip
    parser.add_argument("--strategy", action="append", help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plot")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    return parser.parse_args()


def main() -> None:
    """Run one after the other."""
    options = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = SIZES[options.size]
    model = GPT(size)
    data = Text(read_text(None), size.context)
    rows = []
    for name in options.strategy or known_strategies():
        ranks = rd.run(train, options.ranks, args=(name, model, data, options))
        rows.append(add_up(name, [one for one in ranks if one is not None]))
    show(rows, options)
    if options.json is not None:
        # What is held and sent is the same wherever it runs; times are for benchmarks to tell.
        left_out = ("losses", "seconds")
        kept = [{key: row[key] for key in row if key not in left_out} for row in rows]
        head = {"ranks": options.ranks, "size": options.size, "steps": options.steps}
        options.json.write_text(json.dumps({**head, "rows": kept}, indent=1) + "\n")


def train(
    comm: rd.Communicator, name: str, model: GPT, data: Text, options: argparse.Namespace
) -> dict[str, Any]:
    """Be one rank of one strategy; ranks are forks, so each has a model of its own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    strategy = in_buckets(name, options.bucket)
    _, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
    batches = rd.loader(data, options.batch, comm=comm, model=model, drop_last=True, quiet=True)
    losses, times = [], []
    for tokens, targets in batches:
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model, tokens, targets)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
        losses.append(loss.item())
        if len(losses) == options.steps:
            break
    book = rd.ledger(model)
    return {"losses": losses, "seconds": statistics.median(times), "ledger": book.to_json()}


def in_buckets(name: str, size: int) -> str | rd.Ddp | rd.Zero:
    """Return the strategy, with buckets of this size if it has any."""
    if name == "ddp":
        return rd.Ddp(bucket_bytes=size)
    return rd.Zero(int(name[-1]), bucket_bytes=size) if name.startswith("zero") else name


def add_up(name: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one line: means over ranks, and the rank that holds and sends most."""
    books = json.loads(ranks[0]["ledger"])["entries"]
    curves = [statistics.mean(step) for step in zip(*(r["losses"] for r in ranks), strict=True)]
    few = max(1, len(curves) // 10)

    def most(word: str) -> int:
        return max(sum(entry[word].values()) for entry in books)

    return {
        "strategy": name,
        "loss": statistics.mean(curves[-few:]),
        "seconds": max(rank["seconds"] for rank in ranks),
        "held": [most("predicted"), most("measured")],
        "sent": [
            max(entry["sent_predicted"] for entry in books),
            max(entry["sent"] or 0 for entry in books),
        ],
        "losses": curves,
    }


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table, and draw the losses."""
    title = f"{options.size} GPT, {options.ranks} ranks, {options.steps} steps"
    table = Table(title=title, caption="bytes: predicted / measured, of the rank that has most")
    for word in ("strategy", "loss", "step", "held", "sent per step"):
        table.add_column(word, justify="left" if word == "strategy" else "right")
    for row in rows:
        held, sent = ("{:,.0f} / {:,.0f}".format(*row[word]) for word in ("held", "sent"))
        table.add_row(
            row["strategy"], f"{row['loss']:.3f}", f"{row['seconds'] * 1e3:.1f} ms", held, sent
        )
    Console().print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    curves = {row["strategy"]: list(enumerate(row["losses"], start=1)) for row in rows}
    picture = chart(curves, title=title, across=Axis("step"), up=Axis("loss, nats per byte"))
    (options.out / "strategies.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
