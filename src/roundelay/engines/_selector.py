"""Which algorithm runs a call: engines know none, so they are given what chooses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from roundelay.engines._call import CollectiveCall
from roundelay.schedule import Schedule

#: The schedule for a call, by the name of an algorithm or, for None, the best one.
ScheduleFor = Callable[[CollectiveCall, str | None], Schedule]


class Select(Protocol):
    """Makes the selector for so many ranks: on this host, or with no cores known, anywhere."""

    def __call__(self, size: int, *, cores: int | None = None) -> Selector:
        """Return it."""


class Candidates(NamedTuple):
    """Algorithms that give the same bits; an engine may find out which is quickest."""

    by_slots: tuple[str, ...]  # the usual one first
    by_reading: tuple[str, ...] = ()  # where ranks can read one another's private memory


class SizeClass(NamedTuple):
    """The algorithms for messages of up to so many bytes."""

    up_to: float
    candidates: Candidates
    rounding_once: Candidates  # for halves and means


class Selector(ABC):
    """Chooses the algorithm that runs a call, on so many ranks."""

    size: int
    algorithms: Sequence[str]  # short names, by number

    @abstractmethod
    def for_size(self, size: int) -> Selector:
        """Return the selector for a group of so many ranks."""

    @abstractmethod
    def choose(self, call: CollectiveCall, algorithm: str | None) -> str:
        """Return the full name of the algorithm for a call: the one asked for, or the best."""

    def candidates(self, call: CollectiveCall, algorithm: str | None) -> Candidates:
        """Return that, and what gives the same bits and may be quicker."""
        return Candidates((self.choose(call, algorithm),))

    @abstractmethod
    def size_classes(self, collective: str) -> Sequence[SizeClass]:
        """Return what `candidates` says of plain calls, in rising order of bytes."""

    @abstractmethod
    def number(self, name: str) -> int:
        """Return the place of an algorithm in `algorithms`."""

    @abstractmethod
    def schedule(self, name: str, root: int) -> Schedule:
        """Return an algorithm's schedule."""

    def schedule_for(self, call: CollectiveCall, algorithm: str | None) -> Schedule:
        """Return the schedule of a call, for engines that walk schedules themselves."""
        return self.schedule(self.choose(call, algorithm), call.root)
