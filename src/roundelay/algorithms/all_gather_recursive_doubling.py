"""All-gather by recursive doubling: pairs swap all they hold."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms._powers import bits, largest_power
from roundelay.collectives.all_gather import all_gather
from roundelay.schedule import Transfer, sequence

__all__ = ["all_gather_recursive_doubling"]


@implements(all_gather)
def all_gather_recursive_doubling(size: int) -> Iterator[Transfer]:
    """Swap with the rank one bit away, bit by bit; what a rank holds doubles in every step.

    log2 N steps for powers of two. Otherwise the surplus ranks hand in their block first and get
    the whole result last: two steps more.
    """
    power = largest_power(size)
    surplus = range(power, size)

    def blocks(rank: int) -> list[int]:
        return [rank, rank + power] if rank + power < size else [rank]

    doubling = (
        Transfer(bit, src=rank, dst=rank ^ 1 << bit, chunk=block)
        for bit in bits(power)
        for rank in range(power)
        for held in range(rank >> bit << bit, (rank >> bit << bit) + (1 << bit))
        for block in blocks(held)
    )
    return sequence(
        [Transfer(0, src=rank, dst=rank - power, chunk=rank) for rank in surplus],
        doubling,
        [
            Transfer(0, src=rank - power, dst=rank, chunk=block)
            for rank in surplus
            for block in range(size)
            if block != rank
        ],
    )
