"""Cuts a played step into moments: at each, what every rank holds, does and has sent so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from roundelay.planning.held import Held
from roundelay.view.training_step.choices import StepChoices, StepSizes
from roundelay.view.training_step.ddp import play_ddp
from roundelay.view.training_step.lanes import (
    ABSENT,
    PARTS,
    CellChange,
    LaneSpan,
    Movement,
    StepLanes,
)
from roundelay.view.training_step.parameter_server import play_alone, play_together
from roundelay.view.training_step.zero import play_zero

__all__ = ["StepFrame", "TrainingStep", "training_step"]

Cells = Mapping[str, Sequence[str]]  # by part: a cell for each layer


@dataclass(frozen=True, slots=True)
class StepFrame:
    """One moment, until the next."""

    at: float
    until: float
    cells: Sequence[Cells]  # by rank
    held: Sequence[Held]  # by rank; its transient is that of buffers, and layers gathered now
    sent: Sequence[int]  # by rank, so far
    spans: Sequence[LaneSpan]  # under way
    movements: Sequence[Movement]  # under way
    versions: Mapping[int, int]  # of parameters, by rank; -1 is the server's; else empty


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A whole step: its lanes, and its moments. The first is before it, the last one after it."""

    choices: StepChoices
    sizes: StepSizes
    spans: Sequence[LaneSpan]
    movements: Sequence[Movement]
    frames: Sequence[StepFrame]

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.frames[-1].at

    @property
    def waited(self) -> list[float]:
        """Seconds in which each rank neither computed nor had anything to do."""
        total = [0.0] * self.choices.ranks
        for span in self.spans:
            if span.lane == "compute" and span.kind == "wait":
                total[span.rank] += span.end - span.start
        return total


@lru_cache(maxsize=64)
def training_step(choices: StepChoices) -> TrainingStep:
    """Play one step.

    >>> step = training_step(StepChoices("zero3", ranks=2, layers=2))
    >>> [held.parameters for held in step.frames[-1].held], step.frames[-1].cells[1]["parameters"]
    ([402759680, 402759680], ('03', '03'))
    """
    sizes = StepSizes(choices)
    lanes = StepLanes(sizes)
    if choices.strategy == "ddp":
        play_ddp(lanes)
    elif choices.divided:
        play_zero(lanes, int(choices.strategy[-1]))
    elif choices.strategy == "ps":
        play_together(lanes)
    else:
        play_alone(lanes)
    return TrainingStep(choices, sizes, lanes.spans, lanes.movements, _frames(lanes))


def _frames(lanes: StepLanes) -> list[StepFrame]:
    times = sorted({round(at, 12) for span in lanes.spans for at in (span.start, span.end)})
    changes = sorted(lanes.changes, key=lambda one: one.at)
    cells = [{part: [lanes.whole(ABSENT)] * lanes.layers for part in PARTS} for _ in lanes.ranks]
    found = [_frame(lanes, cells, changes, 0.0, 0.0)]
    found += [_frame(lanes, cells, changes, at, until)
              for at, until in zip(times, [*times[1:], times[-1]], strict=True)]  # fmt: skip
    return found


def _frame(
    lanes: StepLanes, cells: list[dict[str, list[str]]], changes: list[CellChange],
    at: float, until: float,
) -> StepFrame:  # fmt: skip
    """Apply what has changed until now to the cells, and return the moment."""
    edge = at + 1e-11
    while changes and changes[0].at <= edge:
        change = changes.pop(0)
        cells[change.rank][change.part][change.unit] = change.cell
    sent = [0] * lanes.size
    for movement in lanes.movements:
        if movement.end <= edge:
            for src, _, nbytes in movement.pairs:
                sent[src] += nbytes
    under_way = until > at
    latest: dict[int, int] = {}
    for when, rank, version in lanes.versions:
        if when <= edge:
            latest[rank] = max(version, latest.get(rank, 0))
    return StepFrame(
        at,
        until,
        [{part: tuple(row) for part, row in mine.items()} for mine in cells],
        [_held(lanes, rank, mine) for rank, mine in enumerate(cells)],
        sent,
        [one for one in lanes.spans if under_way and one.start <= edge < one.end],
        [one for one in lanes.movements if under_way and one.start <= edge < one.end],
        latest,
    )


def _held(lanes: StepLanes, rank: int, cells: Cells) -> Held:
    """Return the bytes that a rank holds: as at the end, but for gradients that are not yet there.

    A layer of ZeRO-3 that is whole for a while is transient.
    """
    sizes, full = lanes.sizes, lanes.sizes.held(rank)
    there = sum(cell.strip(ABSENT) != "" for cell in cells["gradients"])
    gathered = 0
    if sizes.choices.strategy == "zero3" and lanes.size > 1:
        whole = sum(ABSENT not in cell for cell in cells["parameters"])
        gathered = whole * sizes.unit * sizes.width.parameter
    return Held(
        full.parameters,
        full.gradients * there // lanes.layers,
        full.optimizer,
        full.transient + gathered,
    )
