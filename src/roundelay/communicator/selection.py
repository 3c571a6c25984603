"""Which algorithm runs a call: the one that was asked for, or the best for its bytes."""

from __future__ import annotations

from functools import lru_cache

from roundelay.algorithms import algorithms
from roundelay.arguments import shown
from roundelay.engines import Candidates, CollectiveCall, Selector, SizeClass
from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.schedule import Schedule
from roundelay.tuning import Tuning, default_for, host_tuning, rounds_once

__all__ = ["Selection", "anywhere"]

NUMBERS = {name: number for number, name in enumerate(algorithms.names())}
SHORT_NAMES = tuple(algorithm.short_name for algorithm in algorithms)
COLLECTIVE_OF = {algorithm.name: algorithm.collective.name for algorithm in algorithms}
HALVES = ("float16", "bfloat16")
EVER = 1 << 62  # bytes: more than any message has


class Selection(Selector):
    """The choice for one number of ranks, by the table of this host unless another is given."""

    algorithms = SHORT_NAMES

    def __init__(
        self, size: int, tuning: Tuning | None = None, *, cores: int | None = None
    ) -> None:
        self.size, self.cores = size, cores
        self._given = tuning
        self.tuning = tuning or host_tuning(size, cores=cores)
        self._rounding_once = default_for(size, cores=0)  # no chains

    def for_size(self, size: int) -> Selection:
        """Return the choice for a group of so many ranks."""
        return Selection(size, self._given, cores=self.cores)

    def choose(self, call: CollectiveCall, algorithm: str | None) -> str:
        """Return the full name of the algorithm for a call."""
        if algorithm is not None:
            return _forced(call.collective, algorithm)
        return self.candidates(call, None).by_slots[0]

    def candidates(self, call: CollectiveCall, algorithm: str | None) -> Candidates:
        """Return the tables'; an algorithm that was asked for has no rivals."""
        if algorithm is not None:
            return Candidates((self.choose(call, algorithm),))
        once = call.dtype in HALVES or call.op == "avg"
        return self._candidates(call.collective, call.nbytes, once=once)

    def _candidates(self, collective: str, nbytes: int, *, once: bool) -> Candidates:
        usual = self.tuning.choose(collective, nbytes)
        rivals, reading = self.tuning.rivals_of(collective, nbytes)
        if once and not rounds_once(usual, self.size):
            usual = self._rounding_once.choose(collective, nbytes)
        fit = [name for name in rivals if not once or rounds_once(name, self.size)]
        return Candidates(tuple(dict.fromkeys((usual, *fit))), reading)

    def size_classes(self, collective: str) -> list[SizeClass]:
        """Return what the tables say by bytes, of plain calls."""
        found = []
        for up_to in self.tuning.limits(collective):
            nbytes = int(min(up_to, EVER))
            usual, once = (
                self._candidates(collective, nbytes, once=once) for once in (False, True)
            )
            found.append(SizeClass(up_to, usual, once))
        return found

    def number(self, name: str) -> int:
        """Return the place of an algorithm in `algorithms`."""
        return NUMBERS[name]

    def schedule(self, name: str, root: int) -> Schedule:
        """Return an algorithm's schedule."""
        return _schedule(name, self.size, root)


def anywhere(size: int) -> Selection:
    """Return the choice for ranks that may be on any host."""
    return Selection(size, cores=0)


@lru_cache(maxsize=128)
def _schedule(name: str, size: int, root: int) -> Schedule:
    return algorithms.load(name).schedule(size, root)


def _forced(collective: str, algorithm: str) -> str:
    """Return the full name of an algorithm that the caller asked for."""
    prefix = f"{collective}_"
    if not isinstance(algorithm, str):
        raise InvalidArgumentError(
            f"{collective}: algorithm is a name, such as those of `roundelay list {collective}`, "
            f"not {shown(algorithm)}."
        )
    name = prefix + algorithm.removeprefix(prefix)
    if COLLECTIVE_OF.get(name) != collective:
        same = [other for other, of in COLLECTIVE_OF.items() if of == collective]
        known = [other.removeprefix(prefix) for other in same]
        raise UnknownNameError(f"algorithms of {collective}", algorithm, known)
    return name
