"""All-reduce through a parameter server: a star, as data parallelism began."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms.broadcast_direct import broadcast_direct
from roundelay.algorithms.reduce_direct import reduce_direct
from roundelay.collectives.all_reduce import all_reduce
from roundelay.schedule import Transfer, sequence

__all__ = ["all_reduce_parameter_server"]


@implements(all_reduce)
def all_reduce_parameter_server(size: int, *, server: int = 0) -> Iterator[Transfer]:
    """Push everything to the server, which adds it up; pull the result back.

    Two steps, but N - 1 times the data goes into the server and out again: the bottleneck that the
    ring was invented to remove.
    """
    return sequence(reduce_direct(size, server), broadcast_direct(size, server))
