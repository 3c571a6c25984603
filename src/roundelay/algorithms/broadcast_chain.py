"""Broadcast along a chain, in segments: a pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms._trees import rotated
from roundelay.collectives.broadcast import broadcast
from roundelay.schedule import Transfer, pipeline, relabel

__all__ = ["broadcast_chain"]


@implements(broadcast, parts=lambda segments, **_: segments)
def broadcast_chain(size: int, root: int, *, segments: int = 4) -> Iterator[Transfer]:
    """Pass segments from neighbour to neighbour; every rank sends one while it receives the next.

    N - 2 + segments steps; every rank but the last sends the data once.
    """
    hops = (Transfer(rank, src=rank, dst=rank + 1, chunk=0) for rank in range(size - 1))
    return relabel(pipeline(hops, segments), ranks=rotated(size, root))
