"""All-reduce, one-shot: everyone reads everyone and adds for itself."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.all_reduce import all_reduce
from roundelay.schedule import Transfer

__all__ = ["all_reduce_one_shot"]


@implements(all_reduce)
def all_reduce_one_shot(size: int) -> Iterator[Transfer]:
    """Send everything to everyone; each rank folds all of it in rank order.

    One step, so the quickest for small data; every rank receives N - 1 times the data.
    """
    for src in range(size):
        for dst in range(size):
            if src != dst:
                yield Transfer(0, src=src, dst=dst, chunk=0, op="reduce")
