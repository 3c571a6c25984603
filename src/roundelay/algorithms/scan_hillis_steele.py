"""Scan, Hillis-Steele: add from 1 below, then from 2, then from 4."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms._powers import bits
from roundelay.collectives.scan import scan
from roundelay.schedule import Transfer

__all__ = ["scan_hillis_steele"]


@implements(scan)
def scan_hillis_steele(size: int) -> Iterator[Transfer]:
    """Add the partial result of the rank 2^k below, for every k: ceil(log2 N) steps."""
    for bit in bits(size):
        reach = 1 << bit
        for rank in range(size - reach):
            yield Transfer(bit, src=rank, dst=rank + reach, chunk=0, op="reduce")
