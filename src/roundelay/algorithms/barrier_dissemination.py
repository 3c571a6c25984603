"""Barrier by dissemination: tell the rank 2^k above, for every k."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms._powers import bits
from roundelay.collectives.barrier import barrier
from roundelay.schedule import Transfer

__all__ = ["barrier_dissemination"]


@implements(barrier)
def barrier_dissemination(size: int) -> Iterator[Transfer]:
    """Pass on all news to the rank 2^k above: after ceil(log2 N) steps all have heard of all."""
    for bit in bits(size):
        for rank in range(size):
            yield Transfer(bit, src=rank, dst=(rank + (1 << bit)) % size, chunk=0, op="reduce")
