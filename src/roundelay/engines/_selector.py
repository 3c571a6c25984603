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


class SizeClass(NamedTuple):
    """The algorithm for messages of up to so many bytes."""

    up_to: float
    algorithm: str
    rounds_once: bool  # else halves and means take another
    reading: str = ""  # the algorithm where ranks can read one another's memory, if any


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

    def choose_reading(self, call: CollectiveCall, algorithm: str | None) -> str:
        """Return the algorithm where ranks can read one another's private memory; "" for none."""
        del call, algorithm
        return ""

    @abstractmethod
    def size_classes(self, collective: str) -> Sequence[SizeClass]:
        """Return what `choose` says of plain calls, in rising order of bytes."""

    @abstractmethod
    def number(self, name: str) -> int:
        """Return the place of an algorithm in `algorithms`."""

    @abstractmethod
    def schedule(self, name: str, root: int) -> Schedule:
        """Return an algorithm's schedule."""

    def schedule_for(self, call: CollectiveCall, algorithm: str | None) -> Schedule:
        """Return the schedule of a call, for engines that walk schedules themselves."""
        return self.schedule(self.choose(call, algorithm), call.root)
