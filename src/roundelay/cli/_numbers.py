"""Real numbers for a picture: what the user gave, what every cell holds, what every rank gets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roundelay.collectives import Collective
from roundelay.engines.reference import Reference
from roundelay.errors import InvalidArgumentError
from roundelay.reductions import Array
from roundelay.schedule import Cell, Schedule, split

__all__ = ["Numbers", "counts_from", "run", "size_for", "values_from"]

#: A cell of a picture shows this many elements of a longer run.
MOST_SHOWN = 8
WAY_OUT = 'Ranks are separated by spaces, elements by commas: --values "1,1 2,2 3,3 4,4".'

Values = list[list[str]]


@dataclass(frozen=True, slots=True)
class Numbers:
    """A run with real numbers: the texts of every frame, and every rank's output."""

    frames: list[Mapping[Cell, str]]
    outputs: list[str]


def values_from(text: str) -> Values:
    """Read "1,1 2,2": ranks by spaces, elements by commas; or each rank in brackets.

    >>> values_from("1,2 3,4") == values_from("[1, 2], [3, 4]") == [["1", "2"], ["3", "4"]]
    True
    """
    ranks = re.findall(r"\[([^\[\]]*)\]", text) if "[" in text else text.split()
    if not ranks:
        raise InvalidArgumentError(f"--values is empty. {WAY_OUT}")
    values = [[element.strip() for element in rank.split(",")] if rank else [] for rank in ranks]
    for rank, elements in enumerate(values):
        for element in elements:
            try:
                float(element)
            except ValueError:
                raise InvalidArgumentError(
                    f"--values: '{element}' of rank {rank} is not a number. {WAY_OUT}"
                ) from None
    return values


def counts_from(text: str) -> list[int]:
    """Read "1,1,0,0": the elements of every block.

    >>> counts_from("1,1,0,0")
    [1, 1, 0, 0]
    """
    try:
        return [int(count) for count in text.split(",")]
    except ValueError:
        raise InvalidArgumentError(
            f"--counts takes one whole number per block, as in 1,1,0,0, not '{text}'."
        ) from None


def size_for(collective: Collective, values: Values, size: int | None) -> int:
    """Return the number of ranks that the values are for."""
    if size is None or size == len(values):
        return len(values)
    if len(values) == 1 and _only_root_gives(collective):
        return size
    raise InvalidArgumentError(
        f"-n {size}, but --values has numbers for {len(values)} ranks. Leave out -n, or give "
        f"{size} groups of numbers."
    )


def run(
    schedule: Schedule, values: Values, *, op: str = "sum", counts: Sequence[int] | None = None
) -> Numbers:
    """Run the schedule on the reference engine, and write down what every cell holds."""
    collective = schedule.collective
    if collective.idempotent:
        raise InvalidArgumentError(f"{collective.name} carries no data. Leave out --values.")
    if len(values) not in (1, schedule.size) or (
        len(values) < schedule.size and not _only_root_gives(collective)
    ):
        raise InvalidArgumentError(
            f"{schedule.name} has {schedule.size} ranks, but --values has numbers for "
            f"{len(values)}. {WAY_OUT}"
        )
    if len(values) < schedule.size:
        values = [values[0]] * schedule.size
    inputs = _arrays(values, floats=op == "avg")
    if counts is None:
        _check_lengths(schedule, inputs)
    frames = list(Reference().trace(schedule, inputs, op=op, counts=counts))
    return Numbers(
        frames=[{cell: _text(array) for cell, array in frame.items()} for frame in frames],
        outputs=[_output(schedule, frames[-1], rank) for rank in range(schedule.size)],
    )


def _only_root_gives(collective: Collective) -> bool:
    return not list(collective.before(2, 0, 1))


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
