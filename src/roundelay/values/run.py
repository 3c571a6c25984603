"""What every cell of a picture holds and every rank gets, by the reference engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from roundelay.engines.reference import Reference
from roundelay.errors import InvalidArgumentError, rank_count
from roundelay.reductions import Array
from roundelay.schedule import Cell, Schedule, split
from roundelay.values.read import WAY_OUT, Numbers, Values, only_root_gives

__all__ = ["run"]

#: A cell of a picture shows this many elements of a longer run.
MOST_SHOWN = 8


def run(
    schedule: Schedule, values: Values, *, op: str = "sum", counts: Sequence[int] | None = None
) -> Numbers:
    """Run the schedule on the reference engine, and write down what every cell holds."""
    collective = schedule.collective
    if collective.idempotent:
        raise InvalidArgumentError(f"{collective.name} carries no data. Leave out --values.")
    if len(values) not in (1, schedule.size) or (
        len(values) < schedule.size and not only_root_gives(collective)
    ):
        raise InvalidArgumentError(
            f"{schedule.name} has {rank_count(schedule.size)}, but --values has numbers for "
            f"{len(values)}. {WAY_OUT}"
        )
    if len(values) < schedule.size:
        values = [values[0]] * schedule.size
    inputs = _arrays(values, floats=op == "avg")
    if counts is None:
        _check_lengths(schedule, inputs)
    frames = list(Reference.trace(schedule, inputs, op=op, counts=counts))
    return Numbers(
        frames=[{cell: _text(array) for cell, array in frame.items()} for frame in frames],
        outputs=[_output(schedule, frames[-1], rank) for rank in range(schedule.size)],
    )


def _arrays(values: Values, *, floats: bool) -> list[Array]:
    """Make whole numbers int64 and, if any has a point or op needs it, everything float64."""
    if not floats:
        try:
            return [np.array([int(element) for element in rank], dtype=np.int64) for rank in values]
        except OverflowError:
            raise InvalidArgumentError(
                "--values has a whole number beyond 64 bits. Write it as a float: 1e20."
            ) from None
        except ValueError:
            pass  # some element is no whole number: all become floats
    return [np.array([float(element) for element in rank]) for rank in values]


def _check_lengths(schedule: Schedule, inputs: Sequence[Array]) -> None:
    """Refuse lengths that do not split into the blocks, and name the way out."""
    collective, size = schedule.collective, schedule.size
    counts: dict[int, int] = {}
    uneven: list[tuple[int, int, int]] = []
    for rank, array in enumerate(inputs):
        blocks = list(collective.before(size, schedule.root, rank))
        if blocks and len(array) % len(blocks):
            uneven.append((rank, len(array), len(blocks)))
        for block, run in zip(blocks, split(len(array), max(1, len(blocks))), strict=False):
            counts.setdefault(block, run.stop - run.start)
    if uneven:
        rank, has, into = uneven[0]
        each = ",".join(str(counts[block]) for block in sorted(counts))
        raise InvalidArgumentError(
            f"{collective.name}: rank {rank} has {has} elements, which do not split evenly into "
            f"{into} blocks. Say how they split with --counts {each}, or give a multiple of "
            f"{into} elements."
        )


def _output(schedule: Schedule, cells: Mapping[Cell, Array], rank: int) -> str:
    """Write what a rank gets back: its elements, or a list of them where it gets several blocks."""
    collective, size, root = schedule.collective, schedule.size, schedule.root
    several = max(len(collective.after(max(size, 2), 0, each)) for each in (0, 1)) > 1
    blocks = []
    for block in collective.after(size, root, rank):
        parts = [cells.get(Cell(rank, chunk)) for chunk in schedule.chunks_of(block)]
        held = [part for part in parts if part is not None]
        if len(held) < len(parts):
            return "incomplete"
        blocks.append(_text(np.concatenate(held), most=None))
    if not blocks:
        return "-"
    return f"[{', '.join(blocks)}]" if several else blocks[0]


def _text(array: Array, *, most: int | None = MOST_SHOWN) -> str:
    elements = array.tolist()
    if most is not None and len(elements) > most:
        shown = [*map(_element, elements[: most - 2]), "…", _element(elements[-1])]
    else:
        shown = [*map(_element, elements)]
    return f"[{', '.join(shown)}]"


def _element(value: object) -> str:
    if isinstance(value, tuple):
        number, location = value
        return f"{_element(number)}@{location}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
