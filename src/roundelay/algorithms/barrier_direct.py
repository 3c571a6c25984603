"""Barrier at once: every rank tells every other."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.barrier import barrier
from roundelay.schedule import Transfer

__all__ = ["barrier_direct"]


@implements(barrier)
def barrier_direct(size: int) -> Iterator[Transfer]:
    """Have every rank tell all others: 1 step, N (N - 1) messages.

    For ranks that share cores: whoever comes by next has all the news, and need not come by twice.
    """
    for src in range(size):
        for dst in range(size):
            if src != dst:
                yield Transfer(0, src=src, dst=dst, chunk=0, op="reduce")
