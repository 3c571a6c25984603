"""All-gather, direct: everyone sends everyone its block at once."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.all_gather import all_gather
from roundelay.schedule import Transfer

__all__ = ["all_gather_direct"]


@implements(all_gather)
def all_gather_direct(size: int) -> Iterator[Transfer]:
    """Send your block to every other rank in one step.

    One step; in shared memory, everyone reads everyone.
    """
    for src in range(size):
        for dst in range(size):
            if src != dst:
                yield Transfer(0, src=src, dst=dst, chunk=src)
