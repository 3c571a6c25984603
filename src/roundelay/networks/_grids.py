"""Rows and columns of ranks: what ring, mesh and torus share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from roundelay.errors import InvalidArgumentError, UnsupportedSizeError
from roundelay.networks._base import both_ways
from roundelay.schedule import Link

__all__ = ["check_size", "divisor", "grid", "row_count"]


def check_size(name: str, size: int) -> None:
    """Refuse a size that is not a whole number from 1."""
    if type(size) is not int or size < 1:
        raise InvalidArgumentError(f"{name} needs a whole number from 1 as size, not {size!r}.")


def divisor(name: str, size: int, word: str, value: int | None, *, most: int) -> int:
    """Return the option `value` if it divides the size; by default the largest divisor to `most`.

    >>> divisor("mesh", 12, "rows", None, most=3)
    3
    """
    check_size(name, size)
    if value is None:
        return max(number for number in range(1, most + 1) if size % number == 0)
    if type(value) is not int or value < 1:
        raise InvalidArgumentError(f"{name} needs a whole number from 1 as {word}, not {value!r}.")
    if size % value:
        raise UnsupportedSizeError(f"{name} with {word}={value}", size, f"multiples of {value}")
    return value


def row_count(name: str, size: int, rows: int | None) -> int:
    """Return the number of rows: as square as the size allows, unless given."""
    check_size(name, size)
    return divisor(name, size, "rows", rows, most=math.isqrt(size))


def grid(
    size: int, rows: int, latency: float, bandwidth: float, *, wrap: bool = False
) -> Iterator[Link]:
    """Link neighbours in rows and columns, rank by rank; `wrap` joins the ends of each line."""
    columns = size // rows
    lines = [range(row * columns, (row + 1) * columns) for row in range(rows)]
    lines += [range(column, size, columns) for column in range(columns)]
    for line in lines:
        for a, b in pairwise(line):
            yield from both_ways(a, b, latency, bandwidth)
        # Two in a line are neighbours already.
        if wrap and line[2:]:
            yield from both_ways(line[-1], line[0], latency, bandwidth)
