"""Scan along a chain: each rank adds what comes from below and passes it on."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.scan import scan
from roundelay.schedule import Transfer

__all__ = ["scan_chain"]


@implements(scan)
def scan_chain(size: int) -> Iterator[Transfer]:
    """Pass the running result from rank to rank: N - 1 steps, N - 1 messages."""
    for rank in range(size - 1):
        yield Transfer(rank, src=rank, dst=rank + 1, chunk=0, op="reduce")
