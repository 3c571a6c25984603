"""All-reduce over groups: inside each, between them, inside again."""

from __future__ import annotations

import math
from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms.all_gather_direct import all_gather_direct
from roundelay.algorithms.all_reduce_ring import all_reduce_ring
from roundelay.algorithms.reduce_scatter_direct import reduce_scatter_direct
from roundelay.collectives.all_reduce import all_reduce
from roundelay.errors import UnsupportedSizeError
from roundelay.schedule import Transfer, nest, refine, sequence

__all__ = ["all_reduce_hierarchical"]


@implements(all_reduce, parts=lambda size, **_: size)
def all_reduce_hierarchical(size: int, *, group: int | None = None) -> Iterator[Transfer]:
    """Reduce-scatter inside every group, all-reduce between groups, all-gather inside.

    `group` is the number of ranks per group (per host, say); by default the largest divisor of
    the size up to its square root. Between groups only 1/group of the data travels per rank.
    """
    inside = largest_divisor(size) if group is None else group
    if inside < 1 or size % inside:
        takes = f"multiples of its group of {inside}" if inside > 0 else "groups of at least 1 rank"
        raise UnsupportedSizeError("all_reduce_hierarchical", size, takes)
    hosts = size // inside
    groups = [range(host * inside, (host + 1) * inside) for host in range(hosts)]
    across = [range(local, size, inside) for local in range(inside)]

    # Piece l of a group's data is what local rank l owns; it is cut again, one part per host.
    return sequence(
        refine(nest(groups, reduce_scatter_direct), hosts),
        nest(across, all_reduce_ring, chunks=lambda local, part: local * hosts + part),
        refine(nest(groups, all_gather_direct), hosts),
    )


def largest_divisor(size: int) -> int:
    """Return the largest divisor of `size` whose square does not exceed it.

    >>> [largest_divisor(size) for size in (1, 4, 6, 7, 12)]
    [1, 2, 2, 1, 3]
    """
    return max(d for d in range(1, math.isqrt(size) + 1) if size % d == 0)
