"""All-reduce by recursive doubling: pairs swap everything and add."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms._powers import bits, folded
from roundelay.collectives.all_reduce import all_reduce
from roundelay.schedule import Transfer

__all__ = ["all_reduce_recursive_doubling"]


@implements(all_reduce)
def all_reduce_recursive_doubling(size: int) -> Iterator[Transfer]:
    """Swap the whole data with the rank one bit away and add, bit by bit.

    log2 N steps for powers of two, two more otherwise; the data is sent once per step.
    """

    def doubling(power: int) -> Iterator[Transfer]:
        for bit in bits(power):
            for rank in range(power):
                yield Transfer(bit, src=rank, dst=rank ^ 1 << bit, chunk=0, op="reduce")

    return folded(size, doubling, chunks=1)
