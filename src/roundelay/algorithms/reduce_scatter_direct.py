"""Reduce-scatter, direct: everyone sends every block straight to its owner."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.reduce_scatter import reduce_scatter
from roundelay.schedule import Transfer

__all__ = ["reduce_scatter_direct"]


@implements(reduce_scatter)
def reduce_scatter_direct(size: int) -> Iterator[Transfer]:
    """Send block r to rank r, which folds all of them in rank order.

    One step; the first half of the two-shot all-reduce.
    """
    for src in range(size):
        for dst in range(size):
            if src != dst:
                yield Transfer(0, src=src, dst=dst, chunk=dst, op="reduce")
