"""Broadcast, two-shot: fetch your part from the root, then the rest from the others."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.broadcast import broadcast
from roundelay.schedule import Transfer

__all__ = ["broadcast_two_shot"]


@implements(broadcast, parts=lambda size: max(1, size - 1))
def broadcast_two_shot(size: int, root: int) -> Iterator[Transfer]:
    """Give every other rank a part, which it hands to all others.

    Two steps; the root sends the data once, and nothing of it is read from the root twice.
    """
    others = [rank for rank in range(size) if rank != root]
    for part, rank in enumerate(others):
        yield Transfer(0, src=root, dst=rank, chunk=part)
    for part, rank in enumerate(others):
        for other in others:
            if other != rank:
                yield Transfer(1, src=rank, dst=other, chunk=part)
