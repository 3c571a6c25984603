"""Real numbers for a picture: what the user gave, read and checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from roundelay.collectives import Collective
from roundelay.errors import InvalidArgumentError, rank_count
from roundelay.schedule import Cell

__all__ = [
    "WAY_OUT",
    "Numbers",
    "Values",
    "counts_from",
    "only_root_gives",
    "size_for",
    "values_from",
]

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
    if len(values) == 1 and only_root_gives(collective):
        return size
    raise InvalidArgumentError(
        f"-n {size}, but --values has numbers for {rank_count(len(values))}. Leave out -n, or give "
        f"{size} groups of numbers."
    )


def only_root_gives(collective: Collective) -> bool:
    """Tell whether the root alone brings data."""
    return not list(collective.before(2, 0, 1))
