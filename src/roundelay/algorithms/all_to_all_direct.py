"""All-to-all, direct: everyone sends everyone its block at once."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.all_to_all import all_to_all
from roundelay.schedule import Transfer

__all__ = ["all_to_all_direct"]


@implements(all_to_all)
def all_to_all_direct(size: int) -> Iterator[Transfer]:
    """Send all blocks in one step; in shared memory, everyone reads from everyone."""
    for src in range(size):
        for dst in range(size):
            if src != dst:
                yield Transfer(0, src=src, dst=dst, chunk=src * size + dst)
