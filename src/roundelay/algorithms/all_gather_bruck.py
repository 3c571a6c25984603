"""All-gather, Bruck: doubling for every size, with no surplus ranks."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms._powers import bits
from roundelay.collectives.all_gather import all_gather
from roundelay.schedule import Transfer

__all__ = ["all_gather_bruck"]


@implements(all_gather)
def all_gather_bruck(size: int) -> Iterator[Transfer]:
    """Send what you hold to the rank 2^k below; the last step sends only what is still missing.

    ceil(log2 N) steps for every N; every rank sends (N - 1)/N of the result.
    """
    for bit in bits(size):
        reach = 1 << bit
        for rank in range(size):
            for offset in range(min(reach, size - reach)):
                yield Transfer(
                    bit, src=rank, dst=(rank - reach) % size, chunk=(rank + offset) % size
                )
