"""Broadcast, direct: the root sends to everyone at once."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.broadcast import broadcast
from roundelay.schedule import Transfer

__all__ = ["broadcast_direct"]


@implements(broadcast)
def broadcast_direct(size: int, root: int) -> Iterator[Transfer]:
    """Send the root's data to every other rank in one step.

    One step; the root sends N - 1 times the data.
    """
    for rank in range(size):
        if rank != root:
            yield Transfer(0, src=root, dst=rank, chunk=0)
