"""All-reduce over groups: inside each, between them, inside again."""

from __future__ import annotations

import math
from collections.abc import Iterable

from roundelay.algorithms._base import implements
from roundelay.algorithms.all_gather_direct import all_gather_direct
from roundelay.algorithms.all_reduce_ring import all_reduce_ring
from roundelay.algorithms.reduce_scatter_direct import reduce_scatter_direct
from roundelay.collectives.all_reduce import all_reduce
from roundelay.errors import UnsupportedSizeError
from roundelay.schedule import Axis, NestedCall, Schedule, Transfer, over_hosts

__all__ = ["all_reduce_hierarchical"]

#: What carries a phase.
INNER = {
    "all_gather": all_gather_direct,
    "all_reduce": all_reduce_ring,
    "reduce_scatter": reduce_scatter_direct,
}


@implements(all_reduce, parts=lambda size, **_: size)
def all_reduce_hierarchical(size: int, *, group: int | None = None) -> Iterable[Transfer]:
    """Reduce-scatter inside every group, all-reduce between groups, all-gather inside.

    `group` is the number of ranks per group (per host, say); by default the largest divisor of
    the size up to its square root. Between groups only 1/group of the data travels per rank.
    """
    inside = largest_divisor(size) if group is None else group
    if inside < 1 or size % inside:
        takes = f"multiples of its group of {inside}" if inside > 0 else "groups of at least 1 rank"
        raise UnsupportedSizeError("all_reduce_hierarchical", size, takes)
    groups = [range(first, first + inside) for first in range(0, size, inside)]
    return over_hosts(all_reduce, groups, lanes=inside).expand(_inner).transfers


def _inner(_: Axis, call: NestedCall) -> Schedule:
    return INNER[call.collective.name].schedule(len(call.ranks))


def largest_divisor(size: int) -> int:
    """Return the largest divisor of `size` whose square does not exceed it.

    >>> [largest_divisor(size) for size in (1, 4, 6, 7, 12)]
    [1, 2, 2, 1, 3]
    """
    return max(d for d in range(1, math.isqrt(size) + 1) if size % d == 0)
