"""Pictures of who holds what, measured: a small model trains, and its ledger is drawn."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch

import roundelay as rd
from roundelay.view.chart import framed

__all__ = ["mixed_precision"]

RANKS = 4
WAYS = [
    ("fp32", "ddp"), ("bf16", "ddp"), ("bf16", "zero1"), ("bf16", "zero2"), ("bf16", "zero3"),
]  # fmt: skip
WIDTH, LEFT, RIGHT, ROW = 760, 170, 700, 30
TOP = 64
COLOURS = ("#0b6bcb", "#2b8a3e", "#d9480f", "#862e9c", "#5f6b7a")


def mixed_precision() -> str:
    """Return the picture of what one of four ranks holds for each parameter, with Adam."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
    count = sum(one.numel() for one in model.parameters())
    bars = [
        Bar(f"{precision}, {strategy}", _held(model, precision, strategy, count))
        for precision, strategy in WAYS
    ]
    title = f"What each of {RANKS} ranks holds with Adam"
    return _drawn(bars, title=title, unit="bytes per parameter of the model, as measured")


def _held(model: torch.nn.Module, precision: str, strategy: str, count: int) -> dict[str, float]:
    def train(comm: rd.Communicator) -> Any:
        mine = copy.deepcopy(model)
        mine, optimizer = rd.prepare(
            mine, torch.optim.Adam(mine.parameters()), comm=comm, strategy=strategy,
            precision=precision,
        )  # fmt: skip
        mine(torch.ones(1, 64)).float().sum().backward()
        optimizer.step()
        masters = 0 if precision == "fp32" else 4 / (1 if strategy == "ddp" else comm.size)
        return rd.ledger(mine).entries[0].measured, masters

    held, masters = rd.run(train, RANKS, "threads")[0]
    return {
        "parameters": held.parameters / count,
        "gradients": held.gradients / count,
        "master weights": masters,
        "Adam's two moments": held.optimizer / count - masters,
    }


@dataclass(frozen=True, slots=True)
class Bar:
    """One way to train: what it is called, and how much is held for what."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts.values())


def _drawn(bars: Sequence[Bar], *, title: str, unit: str) -> str:
    """Return the SVG; equal lengths are equal amounts, and every part says its own."""
    words = list(dict.fromkeys(word for bar in bars for word in bar.parts))
    colour = {word: COLOURS[at % len(COLOURS)] for at, word in enumerate(words)}
    scale = (RIGHT - LEFT) / max((bar.total for bar in bars), default=1.0)
    rows = []
    for number, bar in enumerate(bars):
        top, left = TOP + ROW * number, float(LEFT)
        rows.append(
            f'<text x="{LEFT - 10}" y="{top + 15}" text-anchor="end">{escape(bar.name)}</text>'
        )
        for word, amount in bar.parts.items():
            width = amount * scale
            rows.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="20" '
                f'fill="{colour[word]}"/>'
            )
            if width > 30:  # noqa: PLR2004 - room for a number
                rows.append(
                    f'<text x="{left + width / 2:.1f}" y="{top + 14}" text-anchor="middle" '
                    f'fill="#fff" font-size="11">{amount:.3g}</text>'
                )
            left += width
        rows.append(f'<text x="{left + 6:.1f}" y="{top + 15}">{bar.total:.3g}</text>')
    height = TOP + ROW * len(bars) + 36
    at = LEFT
    for word in words:
        rows.append(
            f'<rect x="{at}" y="{height - 28}" width="12" height="12" fill="{colour[word]}"/>'
        )
        rows.append(f'<text x="{at + 17}" y="{height - 18}">{escape(word)}</text>')
        at += 34 + 7 * len(word)
    rows.insert(0, f'<text x="16" y="46">{escape(unit)}</text>')
    return framed(rows, title=title, left=16, size=(WIDTH, height))


if __name__ == "__main__":
    import sys

    sys.stdout.write(mixed_precision())
