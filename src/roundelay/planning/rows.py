"""How gradients and parameters lie in rows, and what they pass through: whole numbers only.

The strategies divide real tensors by these functions, and the planner those of a model that is not
there. So both count the same bytes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

__all__ = [
    "GATHERED_AHEAD",
    "MOST_GOING",
    "PARTS_AFTER_STEP",
    "TURNS",
    "passed_through",
    "runs",
    "waiting",
]

MOST_GOING = 4  # rows on their way at a time
TURNS = 3  # rows with memory of their own: one that takes all of backward, one filled, one sent
PARTS_AFTER_STEP = 2  # memory for this many parts on their way after a step
GATHERED_AHEAD = 2  # units that are whole at a time: one computes, the next one comes


def runs(keys: Sequence[object], sizes: Sequence[int], *, most: int) -> list[list[int]]:
    """Cut 0, 1, 2, … into runs of one key and at most so many bytes; a larger one is alone.

    >>> runs(["a", "a", "b", "b"], [3, 3, 3, 9], most=6)
    [[0, 1], [2], [3]]
    """
    found: list[list[int]] = []
    filled = 0
    for index, (key, nbytes) in enumerate(zip(keys, sizes, strict=True)):
        if not found or keys[found[-1][0]] != key or filled + nbytes > most:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += nbytes
    return found


def passed_through(rows: Sequence[int], shares: Sequence[int], stage: int, *, several: bool) -> int:
    """Return the bytes that gradients pass through: rows filled by turns, results that wait.

    `several` says that a step has several passes, whose sums are added.

    >>> passed_through([40, 40, 80, 20], [10, 10, 20, 5], 2, several=False)
    160
    """
    results = waiting(shares) if stage == 1 or several else 0
    return results + (0 if stage == 1 else sum(heapq.nlargest(TURNS, rows)))


def waiting(shares: Sequence[int]) -> int:
    """Return the memory of results, of which several are on their way, over a few passes.

    >>> waiting([10, 10, 20, 5, 10])
    65
    """
    free: list[int] = []
    made = 0
    seen: set[tuple[int, ...]] = set()
    for _ in range(len(shares) + 1):
        if (state := tuple(free)) in seen:  # from here on passes repeat themselves
            break
        seen.add(state)
        going: deque[int] = deque()
        for nbytes in shares:
            if len(going) >= MOST_GOING:
                free.append(going.popleft())
            fitting = next((one for one in free if one >= nbytes), None)
            if fitting is None:
                made += nbytes
                fitting = nbytes
            else:
                free.remove(fitting)
            going.append(fitting)
        free += going
    return made
