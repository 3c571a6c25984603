"""Gather up a binomial tree: blocks travel in growing bundles."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms._powers import bits
from roundelay.algorithms._trees import binomial, rotated
from roundelay.collectives.gather import gather
from roundelay.schedule import Transfer, relabel

__all__ = ["gather_binomial"]


@implements(gather)
def gather_binomial(size: int, root: int) -> Iterator[Transfer]:
    """Collect each subtree's blocks at its first rank on the way to the root: scatter, reversed.

    ceil(log2 N) steps; the root still receives every other block once.
    """
    ranks = rotated(size, root)
    last = len(bits(size)) - 1
    tree = (
        Transfer(last - step, child, parent, block)
        for step, parent, child, subtree in binomial(size)
        for block in subtree
    )
    return relabel(tree, ranks=ranks, chunks=lambda block: ranks[block])
