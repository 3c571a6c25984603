"""Reduce by reduce-scatter and gather: for large data."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms.gather_binomial import gather_binomial
from roundelay.algorithms.reduce_scatter_ring import reduce_scatter_ring
from roundelay.collectives.reduce import reduce
from roundelay.schedule import Transfer, sequence

__all__ = ["reduce_scatter_gather"]


@implements(reduce, parts=lambda size: size)
def reduce_scatter_gather(size: int, root: int) -> Iterator[Transfer]:
    """Reduce every piece at its own rank, then gather the pieces at the root.

    N - 1 + ceil(log2 N) steps; no rank moves more than about twice the data.
    """
    return sequence(reduce_scatter_ring(size), gather_binomial(size, root))
