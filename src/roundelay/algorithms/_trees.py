"""Binomial trees, seen from rank 0; `relabel` turns them to any root."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._powers import bits


def binomial(size: int) -> Iterator[tuple[int, int, int, range]]:
    """Yield (step, parent, child, subtree) from the root down; `subtree` is the child's ranks.

    >>> list(binomial(3))
    [(0, 0, 2, range(2, 3)), (1, 0, 1, range(1, 2))]
    """
    for step, bit in enumerate(reversed(bits(size))):
        reach = 1 << bit
        for parent in range(0, size, 2 * reach):
            child = parent + reach
            if child < size:
                yield step, parent, child, range(child, min(child + reach, size))


def rotated(size: int, root: int) -> list[int]:
    """Return the ranks in order, starting with the root.

    >>> rotated(4, root=2)
    [2, 3, 0, 1]
    """
    return [(root + rank) % size for rank in range(size)]
