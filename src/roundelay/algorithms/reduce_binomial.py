"""Reduce up a binomial tree: partial sums meet on the way to the root."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms._powers import bits
from roundelay.algorithms._trees import binomial, rotated
from roundelay.collectives.reduce import reduce
from roundelay.schedule import Transfer, relabel

__all__ = ["reduce_binomial"]


@implements(reduce)
def reduce_binomial(size: int, root: int) -> Iterator[Transfer]:
    """Halve the number of ranks that hold a partial sum in every step.

    ceil(log2 N) steps; every rank but the root sends the data once.
    """
    last = len(bits(size)) - 1
    tree = (
        Transfer(last - step, src=child, dst=parent, chunk=0, op="reduce")
        for step, parent, child, _ in binomial(size)
    )
    return relabel(tree, ranks=rotated(size, root))
