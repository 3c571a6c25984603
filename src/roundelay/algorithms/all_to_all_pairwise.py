"""All-to-all, pairwise: one partner per step, so that no port is shared."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.all_to_all import all_to_all
from roundelay.schedule import Transfer

__all__ = ["all_to_all_pairwise"]


@implements(all_to_all)
def all_to_all_pairwise(size: int) -> Iterator[Transfer]:
    """In step k send to the rank k + 1 above and receive from the rank k + 1 below.

    N - 1 steps; every rank sends one block and receives one block in each.
    """
    for step in range(size - 1):
        for src in range(size):
            dst = (src + step + 1) % size
            yield Transfer(step, src=src, dst=dst, chunk=src * size + dst)
