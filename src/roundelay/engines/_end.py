"""One rank's end of a group: what a communicator needs of the engine beneath it.

The native core is one such end, MPI and torch's process groups are others. An engine that can run
jobs, carry messages between two ranks and make smaller groups has the whole communicator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from roundelay import _core
from roundelay.errors import NoRoomError
from roundelay.reductions import Array
from roundelay.schedule import Schedule

if TYPE_CHECKING:
    from roundelay.engines._agreement import Plan

__all__ = [
    "ENDINGS",
    "INNER_TAGS",
    "End",
    "Job",
    "Letter",
    "Quick",
    "ScheduleFor",
    "Task",
    "never",
    "tag_fits",
]

#: From here on tags belong to parts of larger messages, which "any tag" never takes.
INNER_TAGS = 1 << 62

#: How a rank ends its calls: by `close`, by the end of its function or script, by letting go.
ENDINGS = ("closed", "returned", "script", "dropped")


@dataclass(slots=True)
class Job:
    """One collective call of one rank, ready to run."""

    collective: str
    dtype: str
    item: int  # bytes of one element
    count: int  # elements of one block, where all are equal
    nbytes: int  # of the largest buffer of any rank
    finish: Callable[[], Any]  # makes the result once the data has come
    input: Array | None = None  # contiguous
    output: Array | None = None
    op: str = "sum"
    root: int = 0
    counts: Sequence[int] = ()  # elements of every block, where they differ
    label: int = 0  # what the caller knows it by; ranks that differ in it made different calls
    axis: bool = False  # whether blocks are joined along the first dimension, not stacked
    call: str = ""  # what the user called, where this job is but a part of it
    own: str = ""  # which reduction of the user's own is to fold what comes
    plan: Plan | None = None  # of the user's call, where this job is but a part of it


#: The schedule for a job, by the name of an algorithm or, for None, the best one.
ScheduleFor = Callable[[Job, str | None], Schedule]


#: Takes a collective by its place in the alphabetical list, what goes in, what comes out, a
#: reduction by its place in `REDUCTIONS`, and the root. What it refuses comes again as a job.
Quick = Callable[[int, Any, Any, int, int], bool]


def never(*_: object) -> bool:
    """Refuse every quick call."""
    return False


def tag_fits(wanted: int | None, found: int) -> bool:
    """Tell whether a message with the tag `found` is one that was asked for.

    >>> tag_fits(None, 7), tag_fits(None, INNER_TAGS), tag_fits(INNER_TAGS, INNER_TAGS)
    (True, False, True)
    """
    return wanted == found or (wanted is None and found < INNER_TAGS)


class Task(Protocol):
    """A job under way."""

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""

    def wait(self) -> None:
        """Return when the job is done, or raise what went wrong."""


class Letter(Task, Protocol):
    """A message under way."""

    def found(self) -> tuple[int, int, int, str]:
        """Say who sent what has come: the rank, the tag, the number of bytes and the dtype."""


class End(ABC):
    """One rank's end of a group of ranks."""

    rank: int
    size: int
    devices = False  # whether it takes memory that is not the host's, as `DeviceArray`
    names_ranks_of_all = False  # whether the errors of a smaller group name ranks as the whole does
    timeout: float  # seconds without progress after which a call gives up
    #: Runs a call at once if it is a plain one that needs no job, and tells whether it was.
    quick: Quick = staticmethod(never)

    @abstractmethod
    def run(self, job: Job, algorithm: str | None) -> None:
        """Run a job, after all that were started before."""

    @abstractmethod
    def start(self, job: Job, algorithm: str | None) -> Task:
        """Run a job in the background, in the order of the calls."""

    @abstractmethod
    def post(
        self,
        data: Array,
        dtype: str,
        other: int | None,
        tag: int | None,
        *,
        sends: bool,
        background: bool = True,
    ) -> Letter:
        """Send `data`, or receive into it; None is any rank, any tag below `INNER_TAGS`.

        `data` is flat; it belongs to the letter until that is done. Without `background` the caller
        waits for it next, so that it need not go on by itself.
        """

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> Self | None:
        """Return this rank's end of a group of these ranks; None for those who are not in it.

        Every rank calls it. Ranks may be asked for different groups, if these have no rank in
        common; who is in none passes no ranks.
        """

    def memory(self, nbytes: int) -> Array:
        """Return bytes that the engine reaches best. Every rank calls it, with the same number."""
        return _own_bytes(nbytes)

    def own_memory(self, nbytes: int) -> Array:
        """Return bytes that the engine reaches best, as they are; other ranks need not ask."""
        return _own_bytes(nbytes)

    def fail(self, word: str, text: str) -> None:
        """Tell the other ranks that this one "failed" or was "interrupted", and by what.

        An engine that can't say it lets go, so that others see that this rank is gone.
        """
        del word, text
        self.close()

    def waiting(self) -> AbstractContextManager[None]:
        """Return what is entered while ranks wait for others, by whatever way.

        An engine that can tells by then who gives no sign of life.
        """
        return nullcontext()

    def moved(self) -> tuple[list[int], list[int]] | None:
        """Return the bytes taken from, and given to, each rank so far; None if nobody counts."""
        return None

    @abstractmethod
    def end_calls(self, how: str, *, together: bool) -> None:
        """Make no more calls, in one of `ENDINGS`; raise if the ranks did not make the same ones.

        With `together`, wait for all ranks to do so, though not for ever. Who has raised an error
        of this group before is not told once more.
        """

    @abstractmethod
    def close(self) -> None:
        """Say goodbye."""


def _own_bytes(nbytes: int) -> Array:
    """Return ordinary memory, if there is so much: what is only promised kills who touches it."""
    available = _core.available_memory()
    if nbytes > available:
        raise NoRoomError(nbytes, available, "empty")
    return np.empty(nbytes, np.uint8)
