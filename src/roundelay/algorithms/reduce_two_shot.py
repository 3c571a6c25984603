"""Reduce, two-shot: reduce your slice of everyone, then hand it to the root."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.reduce import reduce
from roundelay.schedule import Transfer

__all__ = ["reduce_two_shot"]


@implements(reduce, parts=lambda size: max(1, size - 1))
def reduce_two_shot(size: int, root: int) -> Iterator[Transfer]:
    """Have every other rank reduce a part, and hand it to the root, which only collects.

    Two steps; folded in rank order, once, and by all ranks but the root.
    """
    others = [rank for rank in range(size) if rank != root]
    for part, rank in enumerate(others):
        for other in range(size):
            if other != rank:
                yield Transfer(0, src=other, dst=rank, chunk=part, op="reduce")
    for part, rank in enumerate(others):
        yield Transfer(1, src=rank, dst=root, chunk=part)
