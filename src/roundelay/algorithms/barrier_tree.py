"""Barrier over a tree: report up to rank 0, then release down."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms.broadcast_binomial import broadcast_binomial
from roundelay.algorithms.reduce_binomial import reduce_binomial
from roundelay.collectives.barrier import barrier
from roundelay.schedule import Transfer, sequence

__all__ = ["barrier_tree"]


@implements(barrier)
def barrier_tree(size: int) -> Iterator[Transfer]:
    """Report up a binomial tree, then release down it: 2 ceil(log2 N) steps, 2 (N - 1) messages."""
    return sequence(reduce_binomial(size, 0), broadcast_binomial(size, 0))
