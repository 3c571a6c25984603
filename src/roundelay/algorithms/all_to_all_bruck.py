"""All-to-all, Bruck: few steps, by sending blocks on through others."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms._powers import bits
from roundelay.collectives.all_to_all import all_to_all
from roundelay.schedule import Transfer

__all__ = ["all_to_all_bruck"]


@implements(all_to_all)
def all_to_all_bruck(size: int) -> Iterator[Transfer]:
    """Move a block by 2^k ranks in step k if bit k of its distance is set.

    ceil(log2 N) steps; about half of all blocks travel in each, so more bytes than pairwise.
    """
    for bit in bits(size):
        for src in range(size):
            for distance in range(1, size):
                if distance >> bit & 1:
                    done = distance & ((1 << bit) - 1)
                    yield Transfer(
                        bit,
                        src=(src + done) % size,
                        dst=(src + done + (1 << bit)) % size,
                        chunk=src * size + (src + distance) % size,
                    )
