"""Exclusive scan along a chain, piece by piece: shift by one rank, then scan."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms.scan_pipeline import scan_pipeline
from roundelay.collectives.exscan import exscan
from roundelay.schedule import Transfer, relabel, sequence, shift

__all__ = ["exscan_pipeline"]


@implements(exscan, parts=lambda size: max(1, size - 1))
def exscan_pipeline(size: int) -> Iterator[Transfer]:
    """Hand everyone's data one rank up, then scan over the ranks that got some, in pieces.

    For large data on many ranks: nobody reads more than two others.
    """
    above = scan_pipeline(size - 1) if size > 1 else []
    return sequence(shift(size, chunks=range(size - 1)), relabel(above, ranks=range(1, size)))
