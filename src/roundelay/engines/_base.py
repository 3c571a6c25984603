"""The seam: what a communicator needs of the engine beneath it, and how an engine's ranks begin.

An engine that can run calls, carry messages between two ranks and make smaller groups has the whole
communicator: the native core, MPI, torch's process groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from roundelay.engines._call import (
    Arena,
    CollectiveCall,
    FastPath,
    MessageCall,
    MessageRequest,
    Request,
    no_fast_path,
)
from roundelay.engines._selector import Select
from roundelay.errors import CommunicationError, InvalidArgumentError, NoRoomError
from roundelay.records.phases import Trace
from roundelay.reductions import Array
from roundelay.rendezvous.store import OpenStore, no_store

if TYPE_CHECKING:  # which need a native core, as schedules do not
    from roundelay.engines._run_schedule import ScheduleRunner
    from roundelay.rendezvous.place import JobPlace


def _no_job_to_end() -> None:
    """Do nothing: who fails by itself is missed by the others."""


class Engine(ABC):
    """What the communicator of one rank stands on: each file or folder has one, called after it."""

    rank: int
    size: int
    in_processes = True  # else ranks share objects, and give back what they return as it is
    devices = False  # whether it takes memory that is not the host's, as `DeviceArray`
    rounds = False  # whether it takes calls that are `wide`; else they come rounded
    names_ranks_of_all = False  # whether the errors of a smaller group name ranks as the whole does
    _timeout: float
    tells_slow = True  # of ranks that run, but let this one wait; else whoever uses it does so
    #: Runs a plain call at once, without building it, and tells whether it was one.
    fast_path: FastPath = staticmethod(no_fast_path)
    #: Ends the job of a rank that has failed, where its launcher lets nobody go alone.
    abort: Callable[[], None] = staticmethod(_no_job_to_end)

    #: What takes down what this rank does, where somebody asked for it.
    tracer: Trace | None = None
    traces_calls = False  # whether it takes down its calls itself; else its communicator does

    # ---- how ranks begin; an engine has what it can

    @classmethod
    def start(
        cls, size: int, body: Callable[[Engine], Any], *, select: Select, timeout: float
    ) -> list[Any]:
        """Run `body` on so many new ranks of this host; return what each gave, in rank order.

        What ranks in processes give is bytes. The first error of a rank is raised when all ended.
        """
        del size, body, select, timeout
        raise InvalidArgumentError(f"The engine {cls.__name__.lower()} starts no ranks.")

    @classmethod
    def join(
        cls, place: JobPlace, store: OpenStore = no_store, *, select: Select, timeout: float
    ) -> Engine:
        """Return the engine of this rank, once all that a launcher started are there."""
        del place, store, select, timeout
        raise InvalidArgumentError(f"The engine {cls.__name__.lower()} joins no processes.")

    @classmethod
    def can(cls, what: Literal["start", "join"]) -> bool:
        """Tell whether this engine starts ranks, or joins them."""
        return getattr(cls, what).__func__ is not getattr(Engine, what).__func__

    @classmethod
    def runner(cls) -> ScheduleRunner:
        """Return what runs schedules on new ranks of this host, and keeps them for the next one."""
        from roundelay.engines._rank_pool import RankPool, by_start  # noqa: PLC0415 - see above

        return RankPool(by_start(cls))

    # ---- one rank

    @property
    def timeout(self) -> float:
        """Seconds without progress after which a call gives up on a rank."""
        return self._timeout

    @timeout.setter
    def timeout(self, limit: float) -> None:
        self._timeout = limit
        self._limit_waiting(limit)

    def _limit_waiting(self, limit: float) -> None:  # noqa: B027 - for whom else waits
        """Tell what lies beneath how long to wait from now on."""

    def start_trace(self, trace: Trace) -> None:
        """Take down from now on what this rank does."""
        self.tracer = trace

    @abstractmethod
    def run(self, call: CollectiveCall, algorithm: str | None) -> None:
        """Run a call, after all that were started before."""

    @abstractmethod
    def begin(self, call: CollectiveCall, algorithm: str | None) -> Request:
        """Run a call in the background, in the order of the calls."""

    def labelled_path(self, label: int) -> FastPath:  # noqa: ARG002 - of engines that have none
        """Return the fast path of calls with a label."""
        return no_fast_path

    def bind(self, call: CollectiveCall) -> int | None:  # noqa: ARG002 - of engines that can't
        """Return the number by which compiled programs make a call, with no Python in between.

        None on an engine that can't: Python makes their calls.
        """
        return None

    def trouble(self) -> CommunicationError:
        """Return what broke the group, once a call of a compiled program has said that it is."""
        return CommunicationError("The group is broken, but nobody said why.")

    @abstractmethod
    def post(self, message: MessageCall) -> MessageRequest:
        """Send a message, or receive one."""

    def repeated(self, message: MessageCall) -> Callable[[], None]:
        """Return what makes a message, always with the same memory, and waits until it is done."""
        return lambda: self.post(message).wait()

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

    def narrowed(self, call: CollectiveCall) -> CollectiveCall:
        """Return a wide call rounded, in memory of its own, for who does not round by itself."""
        from roundelay.engines._narrow import narrowed  # noqa: PLC0415 - see above

        return narrowed(call, self.own_memory)

    def arena(self, *, closed: bool = False) -> Arena | None:  # noqa: ARG002 - of who has one
        """Return the memory that arrays can move into, if there is any; `closed`: even then."""
        return None

    def fail(self, word: str, text: str) -> None:
        """Tell the other ranks that this one "failed" or was "interrupted", and by what.

        An engine that can't say it lets go, so that others see that this rank is gone.
        """
        del word, text
        self.close()

    def failed_first(self) -> int | None:
        """Return the rank of the job whose failure was told first; None if this can't know it."""
        world = getattr(self, "world", None)  # of ranks that share memory: it keeps the first only
        trouble: tuple[str, int, int, int, int, str] | None = getattr(world, "trouble", None)
        return None if trouble is None else trouble[1]

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
    def end_calls(self, how: str, *, together: bool, why: str = "") -> None:
        """Make no more calls, in one of `ENDINGS`; raise if the ranks did not make the same ones.

        With `together`, wait for all ranks to do so, though not for ever. Who has raised an error
        of this group before is not told once more. A rank that has "raised" or was "cancelled" says
        `why`: those who need it hear that, and it raises nothing of it.
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
