"""Reduce-scatter around a ring: every block collects its sum on the way home."""

from __future__ import annotations

from collections.abc import Iterable

from roundelay.algorithms._base import implements
from roundelay.algorithms._rings import Direction, turned
from roundelay.collectives.reduce_scatter import reduce_scatter
from roundelay.schedule import Transfer

__all__ = ["reduce_scatter_ring"]


@implements(reduce_scatter)
def reduce_scatter_ring(size: int, *, direction: Direction = "right") -> Iterable[Transfer]:
    """Pass every chunk once around the ring, adding at each hop; rank r ends with chunk r.

    N - 1 steps; every rank sends (N - 1)/N of its data, to one neighbour only, and every link is
    busy in every step.
    """
    ring = (
        Transfer(step, src=rank, dst=(rank + 1) % size, chunk=(rank - step - 1) % size, op="reduce")
        for step in range(size - 1)
        for rank in range(size)
    )
    return turned(ring, size, direction)
