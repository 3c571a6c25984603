"""Exclusive scan, Hillis-Steele: shift by one rank, then scan."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms.scan_hillis_steele import scan_hillis_steele
from roundelay.collectives.exscan import exscan
from roundelay.schedule import Transfer, relabel, sequence, shift

__all__ = ["exscan_hillis_steele"]


@implements(exscan)
def exscan_hillis_steele(size: int) -> Iterator[Transfer]:
    """Hand everyone's data one rank up, then scan over the ranks that got some.

    1 + ceil(log2(N - 1)) steps.
    """
    above = scan_hillis_steele(size - 1) if size > 1 else []
    return sequence(shift(size), relabel(above, ranks=range(1, size)))
