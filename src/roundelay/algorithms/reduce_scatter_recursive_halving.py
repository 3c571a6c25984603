"""Reduce-scatter by recursive halving: pairs swap ever smaller shares."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.algorithms._powers import bits, largest_power
from roundelay.collectives.reduce_scatter import reduce_scatter
from roundelay.schedule import Transfer, sequence

__all__ = ["reduce_scatter_recursive_halving"]


@implements(reduce_scatter)
def reduce_scatter_recursive_halving(size: int) -> Iterator[Transfer]:
    """Swap half of what is left with the rank one bit away and add; the lowest bit goes first.

    log2 N steps for powers of two; every rank sends (N - 1)/N of its data. Otherwise the first
    surplus ranks hand all their data to a neighbour first and get their block last: two steps
    more. Neighbours meet first, so the order of addition is contiguous.
    """
    power = largest_power(size)
    surplus = size - power
    # Group g of the power-of-two run stands for one rank, or for a pair of neighbours.
    groups = [[2 * pair, 2 * pair + 1] for pair in range(surplus)]
    groups += [[rank] for rank in range(2 * surplus, size)]

    halving = (
        Transfer(bit, src=group[-1], dst=groups[index ^ 1 << bit][-1], chunk=block, op="reduce")
        for bit in bits(power)
        for index, group in enumerate(groups)
        for other in range(power)
        # Still mine to give: agrees with me in the bits already done, differs in this one.
        if (other ^ index) & ((2 << bit) - 1) == 1 << bit
        for block in groups[other]
    )
    pairs = groups[:surplus]
    return sequence(
        [
            Transfer(0, src=even, dst=odd, chunk=block, op="reduce")
            for even, odd in pairs
            for block in range(size)
        ],
        halving,
        [Transfer(0, src=odd, dst=even, chunk=even) for even, odd in pairs],
    )
