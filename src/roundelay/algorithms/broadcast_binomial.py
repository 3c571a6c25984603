"""Broadcast down a binomial tree: who has the data sends it on."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms._trees import binomial, rotated
from roundelay.collectives.broadcast import broadcast
from roundelay.schedule import Transfer, relabel

__all__ = ["broadcast_binomial"]


@implements(broadcast)
def broadcast_binomial(size: int, root: int) -> Iterator[Transfer]:
    """Double the number of ranks that hold the data in every step.

    ceil(log2 N) steps; the root sends the data once per step.
    """
    tree = (Transfer(step, parent, child, 0) for step, parent, child, _ in binomial(size))
    return relabel(tree, ranks=rotated(size, root))
