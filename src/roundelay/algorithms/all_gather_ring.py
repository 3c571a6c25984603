"""All-gather around a ring: every block makes the round."""

from __future__ import annotations

from collections.abc import Iterable

from roundelay.algorithms._base import implements
from roundelay.algorithms._rings import Direction, turned
from roundelay.collectives.all_gather import all_gather
from roundelay.schedule import Transfer

__all__ = ["all_gather_ring"]


@implements(all_gather)
def all_gather_ring(size: int, *, direction: Direction = "right") -> Iterable[Transfer]:
    """Pass every block once around the ring; what was received is sent on in the next step.

    N - 1 steps; every rank sends (N - 1)/N of the result, to one neighbour only.
    """
    ring = (
        Transfer(step, src=rank, dst=(rank + 1) % size, chunk=(rank - step) % size)
        for step in range(size - 1)
        for rank in range(size)
    )
    return turned(ring, size, direction)
