"""Exclusive scan, direct: shift by one rank, then scan."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms.scan_direct import scan_direct
from roundelay.collectives.exscan import exscan
from roundelay.schedule import Transfer, relabel, sequence, shift

__all__ = ["exscan_direct"]


@implements(exscan)
def exscan_direct(size: int) -> Iterator[Transfer]:
    """Hand everyone's data one rank up, then scan over the ranks that got some: 2 steps."""
    above = scan_direct(size - 1) if size > 1 else []
    return sequence(shift(size), relabel(above, ranks=range(1, size)))
