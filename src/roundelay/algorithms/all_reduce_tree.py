"""All-reduce over a tree: reduce to rank 0, then broadcast."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms.broadcast_binomial import broadcast_binomial
from roundelay.algorithms.reduce_binomial import reduce_binomial
from roundelay.collectives.all_reduce import all_reduce
from roundelay.schedule import Transfer, sequence

__all__ = ["all_reduce_tree"]


@implements(all_reduce)
def all_reduce_tree(size: int) -> Iterator[Transfer]:
    """Reduce up a binomial tree, then broadcast down the same tree.

    2 ceil(log2 N) steps of the whole data: few steps, many bytes.
    """
    return sequence(reduce_binomial(size, 0), broadcast_binomial(size, 0))
