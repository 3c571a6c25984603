"""Scatter down a binomial tree: halves of the data, then quarters."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms._trees import binomial, rotated
from roundelay.collectives.scatter import scatter
from roundelay.schedule import Transfer, relabel

__all__ = ["scatter_binomial"]


@implements(scatter)
def scatter_binomial(size: int, root: int) -> Iterator[Transfer]:
    """Send each subtree its blocks through the subtree's first rank.

    ceil(log2 N) steps; the root still sends every other block once.
    """
    ranks = rotated(size, root)
    tree = (
        Transfer(step, parent, child, block)
        for step, parent, child, subtree in binomial(size)
        for block in subtree
    )
    return relabel(tree, ranks=ranks, chunks=lambda block: ranks[block])
