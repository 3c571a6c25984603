"""Reduce, two-shot: reduce your slice of everyone, then hand it to the root."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms.gather_direct import gather_direct
from roundelay.algorithms.reduce_scatter_direct import reduce_scatter_direct
from roundelay.collectives.reduce import reduce
from roundelay.schedule import Transfer, sequence

__all__ = ["reduce_two_shot"]


@implements(reduce, parts=lambda size: size)
def reduce_two_shot(size: int, root: int) -> Iterator[Transfer]:
    """Direct reduce-scatter, then direct gather.

    Two steps; folded in rank order, once, and by all ranks instead of the root alone.
    """
    return sequence(reduce_scatter_direct(size), gather_direct(size, root))
