"""One rank of an MPI communicator: MPI's collectives, our schedules over its messages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from roundelay.engines._base import Engine
from roundelay.engines._call import CollectiveCall, MessageCall, Request, Status
from roundelay.engines._call_signature import (
    LONGEST,
    CallSignature,
    encode,
    end_signature,
    mismatch,
    signature_of,
)
from roundelay.engines._over_messages import OverMessages
from roundelay.engines._rank_pool import RankPool
from roundelay.engines._run_schedule import ScheduleRunner
from roundelay.engines._selector import Select
from roundelay.engines.mpi._calls import OwnCalls
from roundelay.engines.mpi._point_to_point import WALK_TAG, MpiMessage, MpiPointToPoint, pieces
from roundelay.engines.mpi._progress import MpiProgress, PolledCall, PolledQueue, Requests, Steps
from roundelay.engines.mpi._ranks import MpirunRanks
from roundelay.engines.mpi.library import in_our_words, load_mpi
from roundelay.errors import (
    CollectiveTimeout,
    CommunicationError,
    InvalidArgumentError,
    PeerLost,
)
from roundelay.reductions import Array
from roundelay.rendezvous.place import JobPlace
from roundelay.rendezvous.store import OpenStore, no_store

__all__ = ["Mpi"]

LARGE_COUNTS_SINCE = 4  # the version of the MPI standard
MOST = (1 << 31) - 1  # elements that one call can count, before that
LINGER_S = 5.0  # for messages that are still going out when a rank says goodbye


class Mpi(Engine):
    """A rank among those of one MPI communicator, which must be used for nothing else.

    Calls in the background go on by themselves, in a thread, where MPI was started with
    `MPI_THREAD_MULTIPLE`, as mpi4py does by default. Otherwise they go on whenever this process
    waits for a call or asks whether one is done.

    MPI does not tell how far a call has come: `timeout` is for one call of MPI's as a whole, and
    for each step of a schedule.
    """

    def __init__(
        self,
        mpi: Any,  # without types, see load_mpi
        comm: Any,
        progress: MpiProgress,
        select: Select,
        timeout: float,
        most: int,
    ) -> None:
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # mpi4py raises what is returned
        self.rank, self.size, self.timeout = comm.Get_rank(), comm.Get_size(), timeout
        self._mpi, self._comm, self._progress, self._most = mpi, comm, progress, most
        self._select = select
        self._selector = select(self.size, cores=0)
        self._agreement = MpiAgreement(mpi, comm)
        self._own = OwnCalls(mpi, comm, most)
        self._over = OverMessages(self.rank, self._post_step)
        self._queue = PolledQueue(self._on_error)
        self._messages = MpiPointToPoint(mpi, comm, most, self._on_error)
        self._error: CommunicationError | None = None  # what broke this engine for good
        self._open = True
        self.abort = partial(mpi.COMM_WORLD.Abort, 1)

    @classmethod
    def join(
        cls, place: JobPlace, store: OpenStore = no_store, *, select: Select, timeout: float
    ) -> Engine:
        """Join all ranks that mpirun started."""
        del place, store
        return cls.of_world(select, timeout)

    @classmethod
    def of_world(cls, select: Select, timeout: float, *, most: int | None = None) -> Self:
        """Return this process's engine among all that mpirun started, apart from users' calls."""
        mpi = load_mpi()
        counted = most or (MOST if mpi.Get_version()[0] < LARGE_COUNTS_SINCE else 1 << 62)
        # Without all threads' calls allowed, nothing can go on while the program computes.
        progress = MpiProgress(threaded=mpi.Query_thread() == mpi.THREAD_MULTIPLE)
        world = mpi.COMM_WORLD
        comm, request = world.Idup()
        limit = time.monotonic() + timeout
        arrived = Requests([request])

        def give_up() -> None:
            if time.monotonic() > limit:
                raise CollectiveTimeout(
                    f"Rank {world.Get_rank()} of {world.Get_size()} waited {timeout:g} s for the "
                    f"others to join it; MPI does not tell who is missing."
                )

        progress.wait(arrived.done, give_up)
        return cls(mpi, comm, progress, select, timeout, counted)

    @classmethod
    def runner(cls) -> ScheduleRunner:
        """Return what has mpirun start ranks: they are no forks, so that `start` has none."""
        return RankPool(MpirunRanks)

    def run(self, call: CollectiveCall, algorithm: str | None) -> None:
        """Begin the call without waiting, and keep asking for it."""
        self._begin_call(call, algorithm, background=False).wait()

    def begin(self, call: CollectiveCall, algorithm: str | None) -> MpiCallRequest:
        """Let the call stand in line; a thread sees to it."""
        return self._begin_call(call, algorithm, background=True)

    def post(self, message: MessageCall) -> MpiMessageRequest:
        """Hand the message to MPI; one that is sent at once is copied, so that nobody waits."""
        self._check()
        name = "any rank" if message.other is None else f"rank {message.other}"
        what = f"{'send to' if message.sends else 'recv from'} {name}"
        with self._progress.lock:
            try:
                posted = self._messages.post(message)
                self._messages.poll()  # short ones are over at once, and need nobody's care
            except self._mpi.Exception as error:
                self._on_error(error, what)
                self._check()
            if not self._messages.idle():
                self._progress.add(self._messages, background=message.background or message.sends)
        handed_over = message.sends and not message.background
        return MpiMessageRequest(self, posted, what, handed_over=handed_over)

    def group(self, ranks: Sequence[int]) -> Self | None:
        """Wait until all have come, and have MPI split the communicator."""
        # Which gives up in time, as MPI's split does not.
        come = self._agreement.steps(CallSignature((self.rank,), "group"))
        self._begin(come, "group", background=False).wait()
        inside = self.rank in ranks
        color = ranks[0] if inside else self._mpi.UNDEFINED
        try:
            split = self._comm.Split(color, list(ranks).index(self.rank) if inside else 0)
        except self._mpi.Exception as error:
            self._on_error(error, "group")
            self._check()
        if not inside:
            return None
        return type(self)(self._mpi, split, self._progress, self._select, self.timeout, self._most)

    def end_calls(self, how: str, *, together: bool, why: str = "") -> None:
        """Compare the end as a last call; all before it were compared when they were made."""
        del how
        if not together or not self._open or self._error is not None:
            return
        come = self._agreement.steps(end_signature((self.rank,), why))
        own = (PeerLost,) if why else ()  # what is on its way already
        with contextlib.suppress(CollectiveTimeout, *own):  # who ends late does no harm
            self._begin(come, "close", background=False).wait()

    def close(self) -> None:
        """Say goodbye, once all that was begun is over and MPI has what was sent."""
        if not self._open:
            return
        self._open, before = False, self._error
        self.wait(self._queue.idle, "close", self.moved_at)
        limit = time.monotonic() + LINGER_S
        self._progress.wait(
            lambda: not self._messages.going() or time.monotonic() > limit, lambda: None
        )
        if before is None and self._error is not None:  # of a call that nobody waited for
            self._check()

    def _begin_call(
        self, call: CollectiveCall, algorithm: str | None, *, background: bool
    ) -> MpiCallRequest:
        own = self._own.steps(call) if algorithm is None else None
        steps = own or self._over.steps(call, self._selector.schedule_for(call, algorithm))
        signature = call.signature or signature_of(call, algorithm, (self.rank,))
        return self._begin(self._agreed(signature, steps), signature.what, background=background)

    def _agreed(self, signature: CallSignature, steps: Steps) -> Steps:
        yield from self._agreement.steps(signature)
        yield from steps

    def _post_step(self, data: Array, other: int, *, sends: bool) -> Request:
        begin = self._comm.Isend if sends else self._comm.Irecv
        parts = pieces(data, self._most)
        return Requests((begin([part, self._mpi.BYTE], other, WALK_TAG) for part in parts), data)

    def _begin(self, steps: Steps, what: str, *, background: bool) -> MpiCallRequest:
        self._check()
        queued = PolledCall(steps, what)
        with self._progress.lock:
            self._queue.add(queued)
        self._progress.add(self._queue, background=background)
        return MpiCallRequest(self, queued)

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))
        if not self._open:
            raise InvalidArgumentError("This communicator is closed.")

    def _on_error(self, error: Exception, what: str) -> None:
        self._fail(in_our_words(self._mpi, error, what))

    def _fail(self, error: CommunicationError) -> None:
        """Break this engine: whoever waits on it is told, and nothing more begins."""
        with self._progress.lock:
            self._error = self._error or error
            self._queue.abandon()
            self._messages.abandon()

    def look(self) -> None:
        """Let everything go on, for those who ask whether something is done."""
        self._progress.poll()

    def wait(self, done: Callable[[], bool], what: str, moved_at: Callable[[], float]) -> None:
        """Return when it is done; give up when nothing has moved for as long as `timeout`."""
        began = time.monotonic()

        def give_up() -> None:
            if time.monotonic() - max(began, moved_at()) > self.timeout:
                self._fail(
                    CollectiveTimeout(
                        f"Rank {self.rank} of {self.size} waited {self.timeout:g} s in {what}; "
                        f"MPI does not tell who is missing."
                    )
                )

        self._progress.wait(lambda: done() or self._error is not None, give_up)
        if not done():
            self._check()

    def moved_at(self) -> float:
        """Tell when a call in line last went on, by the monotonic clock."""
        return self._queue.moved_at


class MpiCallRequest:
    def __init__(self, engine: Mpi, queued: PolledCall) -> None:
        self._engine, self._queued = engine, queued

    def done(self) -> bool:
        if not self._queued.over:
            self._engine.look()
        return self._queued.over

    def wait(self) -> None:
        self._engine.wait(lambda: self._queued.over, self._queued.what, self._engine.moved_at)


class MpiMessageRequest:
    def __init__(self, engine: Mpi, message: MpiMessage, what: str, *, handed_over: bool) -> None:
        self._engine, self._message, self._what = engine, message, what
        self._handed_over = handed_over  # a copy goes out; the sender need not care any more

    def done(self) -> bool:
        if not self._over():
            self._engine.look()
        return self._over()

    def wait(self) -> None:
        self._engine.wait(self._over, self._what, lambda: 0.0)

    def status(self) -> Status:
        status = self._message.status
        return (self._engine.rank, 0, 0, "uint8") if status is None else status

    def _over(self) -> bool:
        return self._handed_over or self._message.over


class MpiAgreement:
    """Compares the plans of the ranks of one MPI communicator."""

    def __init__(self, mpi: Any, comm: Any) -> None:  # without types, see load_mpi
        self._mpi, self._comm = mpi, comm
        self._size: int = comm.Get_size()

    def steps(self, signature: CallSignature) -> Steps:
        """Go on if all ranks plan the same; otherwise raise, on all of them, who plans what."""
        if self._size == 1:
            return
        number = signature.number
        both = np.array([number, -number], np.int64)
        send, kept = [both, self._mpi.INT64_T], np.empty_like(both)
        call = self._comm.Iallreduce(send, [kept, self._mpi.INT64_T], self._mpi.MAX)
        yield [Requests([call], both, kept)]
        if kept[0] == -kept[1]:
            return
        mine, every = encode(signature), np.empty((self._size, LONGEST), np.uint8)
        call = self._comm.Iallgather([mine, self._mpi.BYTE], [every, self._mpi.BYTE])
        yield [Requests([call], mine, every)]
        raise mismatch(every)
