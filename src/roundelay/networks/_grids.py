"""Rows and columns of ranks: what ring, mesh and torus share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from roundelay.arguments import whole
from roundelay.errors import UnsupportedSizeError
from roundelay.networks._base import both_ways
from roundelay.schedule import Link


def check_size(name: str, size: int) -> int:
    """Return the size; refuse what is not a whole number from 1."""
    return whole(f"size of {name}", size, 1)


def divisor(name: str, size: int, word: str, value: int | None, *, most: int) -> int:
    """Return the option `value` if it divides the size; by default the largest divisor to `most`.

    >>> divisor("mesh", 12, "rows", None, most=3)
    3
    """
    if value is None:
        return max(number for number in range(1, most + 1) if size % number == 0)
    value = whole(f"{word} of {name}", value, 1)
    if size % value:
        raise UnsupportedSizeError(f"{name} with {word}={value}", size, f"multiples of {value}")
    return value


def row_count(name: str, size: int, rows: int | None) -> int:
    """Return the number of rows: as square as the size allows, unless given."""
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
