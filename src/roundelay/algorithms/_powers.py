"""Powers of two: how algorithms that pair ranks by bits serve every other size as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from roundelay.schedule import Transfer, relabel, sequence


def bits(size: int) -> range:
    """Count through the bits that number `size` ranks: 0 … ceil(log2(size)) - 1.

    >>> [len(bits(size)) for size in (1, 2, 3, 4, 5)]
    [0, 1, 2, 2, 3]
    """
    return range((size - 1).bit_length())


def largest_power(size: int) -> int:
    """Return the largest power of two up to `size`."""
    return 1 << (size.bit_length() - 1)


def folded(
    size: int,
    inner: Callable[[int], Iterable[Transfer]],
    *,
    chunks: int,
) -> Iterator[Transfer]:
    """Run an all-reduce for a power of two on any size, by folding the surplus ranks away.

    The first `2 * surplus` ranks pair up; the even one of each pair hands its data to the odd one
    and sits out, then gets the result. Neighbours pair, so contiguous order is kept.
    """
    power = largest_power(size)
    surplus = size - power
    ranks = [*range(1, 2 * surplus, 2), *range(2 * surplus, size)]
    pairs = [(2 * pair, 2 * pair + 1, chunk) for pair in range(surplus) for chunk in range(chunks)]
    return sequence(
        [Transfer(0, src=even, dst=odd, chunk=chunk, op="reduce") for even, odd, chunk in pairs],
        relabel(inner(power), ranks=ranks),
        [Transfer(0, src=odd, dst=even, chunk=chunk) for even, odd, chunk in pairs],
    )
