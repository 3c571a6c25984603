"""All-reduce by halving and doubling (Rabenseifner): few steps and few bytes."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms._powers import folded, largest_power
from roundelay.algorithms.all_gather_recursive_doubling import all_gather_recursive_doubling
from roundelay.algorithms.reduce_scatter_recursive_halving import reduce_scatter_recursive_halving
from roundelay.collectives.all_reduce import all_reduce
from roundelay.schedule import Transfer, sequence

__all__ = ["all_reduce_halving_doubling"]


@implements(all_reduce, parts=largest_power)
def all_reduce_halving_doubling(size: int) -> Iterator[Transfer]:
    """Reduce-scatter by recursive halving, then all-gather by recursive doubling.

    2 log2 N steps and 2 (N - 1)/N of the data for powers of two; otherwise two more steps in which
    the surplus ranks send and get the whole data.
    """

    def phases(power: int) -> Iterator[Transfer]:
        return sequence(
            reduce_scatter_recursive_halving(power), all_gather_recursive_doubling(power)
        )

    return folded(size, phases, chunks=largest_power(size))
