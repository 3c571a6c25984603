"""Scan, direct: every rank reads all below it and adds for itself."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.scan import scan
from roundelay.schedule import Transfer

__all__ = ["scan_direct"]


@implements(scan)
def scan_direct(size: int) -> Iterator[Transfer]:
    """Send everything to every rank above, which folds it in rank order: one step."""
    for src in range(size):
        for dst in range(src + 1, size):
            yield Transfer(0, src=src, dst=dst, chunk=0, op="reduce")
