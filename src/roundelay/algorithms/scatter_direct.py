"""Scatter, direct: the root sends every rank its block at once."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.scatter import scatter
from roundelay.schedule import Transfer

__all__ = ["scatter_direct"]


@implements(scatter)
def scatter_direct(size: int, root: int) -> Iterator[Transfer]:
    """Send every other rank its block in one step."""
    for rank in range(size):
        if rank != root:
            yield Transfer(0, src=root, dst=rank, chunk=rank)
