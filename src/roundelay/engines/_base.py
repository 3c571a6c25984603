"""The seam: what a communicator needs of the engine beneath it.

An engine that can run calls, carry messages between two ranks and make smaller groups has the whole
communicator: the native core, MPI, torch's process groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np

from roundelay.collectives import collectives
from roundelay.errors import NoRoomError
from roundelay.reductions import Array, Located
from roundelay.schedule import Schedule

if TYPE_CHECKING:
    from roundelay.engines._call_signature import CallSignature

__all__ = [
    "AXIS",
    "COLLECTIVES",
    "ENDINGS",
    "INNER_TAGS",
    "Buffer",
    "CollectiveCall",
    "Engine",
    "FastPath",
    "MessageRequest",
    "Request",
    "ScheduleFor",
    "Select",
    "Selection",
    "SizeClass",
    "no_fast_path",
    "tag_fits",
]

#: What runners of schedules take and give.
Buffer = Array | Located

#: From here on tags belong to parts of larger messages, which "any tag" never takes.
INNER_TAGS = 1 << 62

#: By name; the native core hands the numbers on, and knows nothing else of them.
COLLECTIVES = {name: number for number, name in enumerate(collectives.names())}

#: Beside the root, where blocks are joined along the first dimension.
AXIS = 1 << 30

#: How a rank ends its calls: by `close`, by the end of its function or script, by letting go.
ENDINGS = ("closed", "returned", "script", "dropped")


@dataclass(slots=True)
class CollectiveCall:
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
    part_of: str = ""  # what the user called, where this is but a part of it
    custom_op: str = ""  # which reduction of the user's own is to fold what comes
    signature: CallSignature | None = None  # of the user's call, where this is a part of it


#: The schedule for a call, by the name of an algorithm or, for None, the best one.
ScheduleFor = Callable[[CollectiveCall, str | None], Schedule]


class Select(Protocol):
    """Makes the selection for so many ranks: on this host, or with no cores known, anywhere."""

    def __call__(self, size: int, *, cores: int | None = None) -> Selection:
        """Return it."""


class SizeClass(NamedTuple):
    """The algorithm for messages of up to so many bytes."""

    up_to: float
    algorithm: str
    rounds_once: bool  # else halves and means take another


class Selection(ABC):
    """Which algorithm runs a call, on so many ranks. Engines know none, so they are given this."""

    size: int
    algorithms: Sequence[str]  # short names, by number

    @abstractmethod
    def for_size(self, size: int) -> Selection:
        """Return the selection for a group of so many ranks."""

    @abstractmethod
    def choose(self, call: CollectiveCall, algorithm: str | None) -> str:
        """Return the full name of the algorithm for a call: the one asked for, or the best."""

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


#: Takes a collective by its place in the alphabetical list, what goes in, what comes out, a
#: reduction by its place in `REDUCTIONS`, and the root. What it refuses comes again, built.
FastPath = Callable[[int, Any, Any, int, int], bool]


def no_fast_path(*_: object) -> bool:
    """Refuse every call, so that all take the long way."""
    return False


def tag_fits(wanted: int | None, tag: int) -> bool:
    """Tell whether a message with the tag `tag` is one that was asked for.

    >>> tag_fits(None, 7), tag_fits(None, INNER_TAGS), tag_fits(INNER_TAGS, INNER_TAGS)
    (True, False, True)
    """
    return wanted == tag or (wanted is None and tag < INNER_TAGS)


class Request(Protocol):
    """Something under way."""

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""

    def wait(self) -> None:
        """Return when the call is done, or raise what went wrong."""


class MessageRequest(Request, Protocol):
    """A message under way."""

    def status(self) -> tuple[int, int, int, str]:
        """Say who sent what has come: the rank, the tag, the number of bytes and the dtype."""


class Engine(ABC):
    """What the communicator of one rank stands on."""

    rank: int
    size: int
    devices = False  # whether it takes memory that is not the host's, as `DeviceArray`
    names_ranks_of_all = False  # whether the errors of a smaller group name ranks as the whole does
    timeout: float  # seconds without progress after which a call gives up
    #: Runs a plain call at once, without building it, and tells whether it was one.
    fast_path: FastPath = staticmethod(no_fast_path)

    @abstractmethod
    def run(self, call: CollectiveCall, algorithm: str | None) -> None:
        """Run a call, after all that were started before."""

    @abstractmethod
    def begin(self, call: CollectiveCall, algorithm: str | None) -> Request:
        """Run a call in the background, in the order of the calls."""

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
    ) -> MessageRequest:
        """Send `data`, or receive into it; None is any rank, any tag below `INNER_TAGS`.

        `data` is flat; it belongs to the request until that is done. Without `background` the
        caller waits for it next, so that it need not go on by itself.
        """

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> Self | None:
        """Return this rank's engine in a group of these ranks; None for those who are not in it.

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

    # ---- ranks without which the job goes on; an engine that knows of none ends with every rank

    losses = 0  # of such ranks, so far
    on_spare: Callable[[str], None] | None = None  # told to who has started the ranks, if it asks

    def spare(self, loss: str) -> None:  # noqa: B027 - see above
        """Let the job go on without this rank, if it is lost, in one of `LOSSES`."""

    def lost(self) -> dict[int, str]:
        """Return the ranks of this group that were lost, and what is known of it."""
        return {}

    def at_step(self, number: int) -> None:  # noqa: B027 - likewise
        """Show in which step of training this rank is."""

    def wait_unless_lost(self, request: MessageRequest, known: int) -> bool:
        """Wait for a message until more than `known` ranks are lost; tell whether it is done."""
        del known
        request.wait()
        return True

    def regroup(self, ranks: Sequence[int]) -> Self | None:  # noqa: ARG002 - likewise
        """Return this rank's engine in a group of these ranks, which alone call it.

        The others may be lost. None if it can't.
        """
        return None

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
        """Let go of the group."""


def _own_bytes(nbytes: int) -> Array:
    """Return ordinary memory, if there is so much: what is only promised kills who touches it."""
    from roundelay import _core  # noqa: PLC0415 - where there is none, engines are still listed

    available = _core.available_memory()
    if nbytes > available:
        raise NoRoomError(nbytes, available, "empty")
    return np.empty(nbytes, np.uint8)
