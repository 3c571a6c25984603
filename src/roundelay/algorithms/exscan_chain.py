"""Exclusive scan along a chain: shift by one rank, then scan."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms.scan_chain import scan_chain
from roundelay.collectives.exscan import exscan
from roundelay.schedule import Transfer, relabel, sequence, shift

__all__ = ["exscan_chain"]


@implements(exscan)
def exscan_chain(size: int) -> Iterator[Transfer]:
    """Hand everyone's data one rank up, then scan over the ranks that got some: N - 1 steps."""
    above = scan_chain(size - 1) if size > 1 else []
    return sequence(shift(size), relabel(above, ranks=range(1, size)))
