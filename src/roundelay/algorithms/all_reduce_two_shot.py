"""All-reduce, two-shot: reduce your slice of everyone, then hand it to everyone."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms.all_gather_direct import all_gather_direct
from roundelay.algorithms.reduce_scatter_direct import reduce_scatter_direct
from roundelay.collectives.all_reduce import all_reduce
from roundelay.schedule import Transfer, sequence

__all__ = ["all_reduce_two_shot"]


@implements(all_reduce, parts=lambda size: size)
def all_reduce_two_shot(size: int) -> Iterator[Transfer]:
    """Direct reduce-scatter, then direct all-gather.

    Two steps and 2 (N - 1)/N of the data; folded in rank order, once. What shared memory runs.
    """
    return sequence(reduce_scatter_direct(size), all_gather_direct(size))
