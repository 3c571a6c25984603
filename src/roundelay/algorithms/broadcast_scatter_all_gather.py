"""Broadcast by scatter and all-gather (van de Geijn): for large data."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms.all_gather_ring import all_gather_ring
from roundelay.algorithms.scatter_binomial import scatter_binomial
from roundelay.collectives.broadcast import broadcast
from roundelay.schedule import Transfer, sequence

__all__ = ["broadcast_scatter_all_gather"]


@implements(broadcast, parts=lambda size: size)
def broadcast_scatter_all_gather(size: int, root: int) -> Iterator[Transfer]:
    """Scatter the data in pieces, then collect the pieces around a ring.

    ceil(log2 N) + N - 1 steps; no rank sends more than about twice the data.
    """
    held = {(root, piece) for piece in range(size)}
    for transfer in sequence(scatter_binomial(size, root), all_gather_ring(size)):
        place = (transfer.dst, transfer.chunk)
        if place not in held:  # the ring would also bring back what the scatter left on its way
            held.add(place)
            yield transfer
