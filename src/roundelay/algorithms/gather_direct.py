"""Gather, direct: everyone sends the root its block at once."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.gather import gather
from roundelay.schedule import Transfer

__all__ = ["gather_direct"]


@implements(gather)
def gather_direct(size: int, root: int) -> Iterator[Transfer]:
    """Send every block to the root in one step."""
    for rank in range(size):
        if rank != root:
            yield Transfer(0, src=rank, dst=root, chunk=rank)
