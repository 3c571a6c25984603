"""How far workers are that do not wait for one another, and how far they may be apart."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Clock", "staleness_bound"]


def staleness_bound(workers: int, bound: int) -> int:
    """Return how many updates a gradient can miss at most, if no worker gets ahead by more.

    A worker takes parameters after its c-th gradient when all others have had at least c - k
    applied; until its next one is applied, none of them can get beyond c + k + 1.

    >>> staleness_bound(4, 0), staleness_bound(4, 2)
    (3, 15)
    """
    return (workers - 1) * (2 * bound + 1)


class Clock:
    """The steps of each worker, as far as others wait for it.

    >>> clock = Clock([0, 1, 2], bound=1)
    >>> clock.tick(0), clock.tick(0), clock.may_go_on(0)
    (None, None, False)
    >>> clock.leave(1), clock.rest(2), clock.may_go_on(0)
    (None, None, True)
    >>> clock.wake(2), clock.may_go_on(0)  # while it rested, its clock went on with the slowest
    (None, True)
    """

    def __init__(self, workers: Iterable[int], bound: int | None) -> None:
        self._steps = dict.fromkeys(workers, 0)  # of those that are still here
        self._resting: set[int] = set()  # workers that nobody waits for
        self._bound = bound

    def tick(self, worker: int) -> None:
        """Count a step."""
        self._steps[worker] += 1

    def rest(self, worker: int) -> None:
        """Wait for a worker no more, until it wakes."""
        self._resting.add(worker)

    def wake(self, worker: int) -> None:
        """Wait for a worker again."""
        if worker in self._resting:
            self._steps[worker] = max(self._steps[worker], self._slowest())
            self._resting.discard(worker)

    def leave(self, worker: int) -> None:
        """Wait for a worker no more, ever."""
        self._steps.pop(worker, None)
        self._resting.discard(worker)

    def may_go_on(self, worker: int) -> bool:
        """Tell whether a worker is not too far ahead of the slowest that is waited for."""
        return self._bound is None or self._steps[worker] - self._slowest() <= self._bound

    def _slowest(self) -> int:
        awake = [steps for one, steps in self._steps.items() if one not in self._resting]
        return min(awake, default=0)
