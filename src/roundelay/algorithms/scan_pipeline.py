"""Scan along a chain, piece by piece: while one piece moves on, the next one follows."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.scan import scan
from roundelay.schedule import Transfer

__all__ = ["scan_pipeline"]


@implements(scan, parts=lambda size: size)
def scan_pipeline(size: int) -> Iterator[Transfer]:
    """Pass N pieces of the running result from rank to rank: 2 N - 2 steps, one piece in each.

    For large data on many ranks: nobody reads more than its own and what comes from below.
    """
    for piece in range(size):
        for rank in range(size - 1):
            yield Transfer(piece + rank, src=rank, dst=rank + 1, chunk=piece, op="reduce")
