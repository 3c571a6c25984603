"""Draw what each rank holds in a pair of cut layers: the shapes are those of a run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import torch
from torch import nn

import roundelay as rd
from roundelay.view.chart import framed

__all__ = ["tensor_parallel"]

RANKS, TOKENS, FEATURES, INNER = 2, 8, 8, 8
LEFT, TOP, SIDE, ACROSS, DOWN = 96, 92, 56, 104, 84
WIDTH = 900
ACTIVATION, WEIGHT, PARTIAL = "#0b6bcb", "#2b8a3e", "#d9480f"
CALLS = {False: ("copy", "all-reduce"), True: ("all-gather", "reduce-scatter")}
PLAN = {"before": "split", "norm": "norm", "up": "column", "down": "row", "after": "gather"}


class Pair(nn.Module):
    """A norm and two layers, whose borders can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Identity(), nn.Identity()
        self.norm = nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, INNER), nn.Linear(INNER, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with what the layers add."""
        x = self.before(x)
        self.seen = [self.norm(x)]
        self.seen.append(self.up(self.seen[0]))
        self.seen.append(self.down(self.seen[1].relu()))
        result: torch.Tensor = self.after(x + self.seen[2])
        return result


@dataclass(frozen=True, slots=True)
class Box:
    """A matrix, and which part of it a rank has: rows and columns, as shares of the whole."""

    label: str
    colour: str
    rows: tuple[float, float] = (0.0, 1.0)
    columns: tuple[float, float] = (0.0, 1.0)


def tensor_parallel() -> str:
    """Return the picture: two ranks, without sequence parallel and with it."""
    parts: list[str] = []
    top = TOP
    for sequence, calls in (
        (False, ("copy", "all-reduce")),
        (True, ("all-gather", "reduce-scatter")),
    ):
        said = "Tensor and sequence parallel" if sequence else "Tensor parallel"
        back = "reduce-scatter, all-gather" if sequence else "all-reduce, copy"
        words = f"{said}: forward {calls[0]} and {calls[1]}; backward, in their places, {back}"
        parts.append(f'<text x="24" y="{top - 34}" font-weight="600">{escape(words)}</text>')
        for rank, boxes in enumerate(_boxes(sequence=sequence)):
            parts += _row(boxes, rank, top + rank * DOWN, calls)
        top += RANKS * DOWN + 70
    parts += _key(top - 40)
    title = "Column parallel, then row parallel: what each of two ranks has"
    return framed(parts, title=title, left=24, size=(WIDTH, top - 10))


def _boxes(*, sequence: bool) -> list[list[Box]]:
    """Run the pair on threads, and return what every rank had."""
    start = Pair()

    def body(comm: rd.Communicator) -> list[Box]:
        model = copy.deepcopy(start)
        rd.apply_plan(model, PLAN, rd.Mesh(tp=RANKS, comm=comm), sequence_parallel=sequence)
        model(torch.zeros(1, TOKENS, FEATURES))
        normed, inner, summed = (seen.shape for seen in model.seen)
        up, down = model.up.weight.shape, model.down.weight.shape
        rank = comm.rank
        tokens = _share(rank, normed[1], TOKENS)
        features = _share(rank, inner[2], INNER)
        return [
            Box("norm(x)", ACTIVATION, tokens),
            Box("x, whole", ACTIVATION),
            Box("up", WEIGHT, columns=_share(rank, up[0], INNER)),
            Box("hidden", ACTIVATION, columns=features),
            Box("down", WEIGHT, _share(rank, down[1], INNER)),
            Box("its part of the sum", PARTIAL),
            Box("the sum", ACTIVATION, _share(rank, summed[1], TOKENS)),
        ]

    return rd.run(body, RANKS, "threads")


def _share(rank: int, here: int, whole: int) -> tuple[float, float]:
    start = 0 if here == whole else rank * here
    return start / whole, (start + here) / whole


def _row(boxes: list[Box], rank: int, top: int, calls: tuple[str, str]) -> Iterator[str]:
    """Yield one rank: matrices from left to right, and the collectives between them."""
    yield f'<text x="24" y="{top + SIDE / 2 + 4}">rank {rank}</text>'
    for at, box in enumerate(boxes):
        left = LEFT + at * ACROSS
        frame = f'width="{SIDE}" height="{SIDE}" fill="none" stroke="#888"'
        yield f'<rect x="{left}" y="{top}" {frame}/>'
        x, width = left + SIDE * box.columns[0], SIDE * (box.columns[1] - box.columns[0])
        y, height = top + SIDE * box.rows[0], SIDE * (box.rows[1] - box.rows[0])
        yield (
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{box.colour}" '
            f'fill-opacity="0.75"/>'
        )
        if rank == 0:
            yield (
                f'<text x="{left + SIDE / 2}" y="{top - 8}" text-anchor="middle" '
                f'font-size="11">{escape(box.label)}</text>'
            )
        if at in (0, len(boxes) - 2):
            yield from _arrow(left + SIDE, top + SIDE / 2, calls[0 if at == 0 else 1], rank)


def _arrow(x: float, y: float, call: str, rank: int) -> Iterator[str]:
    end = x + ACROSS - SIDE
    yield f'<path d="M{x + 4} {y}H{end - 6}m-5 -4l5 4l-5 4" fill="none" stroke="#222"/>'
    if rank == 0:
        yield (
            f'<text x="{(x + end) / 2}" y="{y + DOWN / 2 + 6}" text-anchor="middle" '
            f'font-size="10">{call}</text>'
        )


def _key(top: float) -> Iterator[str]:
    words = {
        ACTIVATION: "activations: tokens down, features across",
        WEIGHT: "weights: inputs down, outputs across",
        PARTIAL: "a whole matrix, to be added",
    }
    for at, (colour, text) in enumerate(words.items()):
        left = 24 + at * 290
        yield f'<rect x="{left}" y="{top}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{left + 18}" y="{top + 11}">{escape(text)}</text>'
