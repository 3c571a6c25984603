"""Reduce along a chain, piece by piece: while one piece moves on, the next one follows."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms.scan_pipeline import scan_pipeline
from roundelay.collectives.reduce import reduce
from roundelay.schedule import Transfer

__all__ = ["reduce_pipeline"]


@implements(reduce, parts=lambda size: size)
def reduce_pipeline(size: int, root: int) -> Iterator[Transfer]:
    """Scan N pieces from rank to rank; the last rank, where all are summed, hands them to the root.

    For large data on many ranks: nobody reads more than its own and what comes from below.
    """
    yield from scan_pipeline(size)
    if root != size - 1:
        for piece in range(size):
            yield Transfer(piece + size - 1, src=size - 1, dst=root, chunk=piece)
