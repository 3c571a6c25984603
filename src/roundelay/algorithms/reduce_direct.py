"""Reduce, direct: everyone sends to the root at once."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.reduce import reduce
from roundelay.schedule import Transfer

__all__ = ["reduce_direct"]


@implements(reduce)
def reduce_direct(size: int, root: int) -> Iterator[Transfer]:
    """Send everyone's data to the root, which folds all of it in rank order.

    One step; the root receives N - 1 times the data.
    """
    for rank in range(size):
        if rank != root:
            yield Transfer(0, src=rank, dst=root, chunk=0, op="reduce")
