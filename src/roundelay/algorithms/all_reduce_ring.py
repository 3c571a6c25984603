"""All-reduce around a ring: the one every introduction draws."""

from __future__ import annotations

from collections.abc import Iterable

from roundelay.algorithms._base import implements
from roundelay.algorithms._rings import Direction
from roundelay.algorithms.all_gather_ring import all_gather_ring
from roundelay.algorithms.reduce_scatter_ring import reduce_scatter_ring
from roundelay.collectives.all_reduce import all_reduce
from roundelay.schedule import Transfer, relabel, sequence

__all__ = ["all_reduce_ring"]


@implements(all_reduce, parts=lambda size, **_: size)
def all_reduce_ring(size: int, *, direction: Direction = "right") -> Iterable[Transfer]:
    """Reduce-scatter, then all-gather, around the same ring.

    2 (N - 1) steps; every rank sends 2 (N - 1)/N of its data, the least possible. Rank r starts
    with chunk r, so the chunk it ends up owning is its neighbour's.
    """
    away = 1 if direction == "right" else -1
    phases = sequence(
        reduce_scatter_ring(size, direction=direction), all_gather_ring(size, direction=direction)
    )
    return relabel(phases, chunks=lambda chunk: (chunk + away) % size)
