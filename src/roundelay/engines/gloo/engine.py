"""One rank of a Gloo process group, which may lie beside the user's own."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Self

from roundelay.engines._base import Engine
from roundelay.engines._call import CollectiveCall, MessageCall, MessageRequest
from roundelay.engines._call_signature import CallSignature, end_signature, signature_of
from roundelay.engines._over_messages import OverMessages
from roundelay.engines._selector import Select
from roundelay.engines.gloo._agreement import GlooAgreement
from roundelay.engines.gloo._point_to_point import GlooPointToPoint
from roundelay.engines.gloo._requests import GlooMessageRequest, SlotRequest
from roundelay.engines.gloo.calls import BETWEEN_TWO_FROM, TWO, GlooCalls
from roundelay.engines.gloo.groups import (
    HeldGroup,
    Trouble,
    as_tensor,
    fork_at,
    load_torch,
    seconds,
    signed_store,
)
from roundelay.errors import (
    CollectiveTimeout,
    CommunicationError,
    InvalidArgumentError,
    PeerLost,
    RendezvousError,
)
from roundelay.processes.call_queue import CallQueue, QueuedCall
from roundelay.reductions import Array
from roundelay.rendezvous.by_store import StoreRendezvous, rendezvous_at
from roundelay.rendezvous.place import JobPlace
from roundelay.rendezvous.store import OpenStore, StoreLost, first_line, no_store

__all__ = ["Gloo", "connected", "cut_lines"]

WALK, NOBODY = 1, 3  # slots of the process group: of walked schedules, and one that is never used


class Gloo(Engine):
    """A rank among processes of one or many hosts that Gloo connects.

    What Gloo has for a reduction and dtype, with our meaning, it does itself; the rest is walked
    over its sends and receives. The order of addition is Gloo's own, the same on all ranks.
    """

    names_ranks_of_all = True

    def __init__(self, rendezvous: StoreRendezvous, select: Select, *, timeout: float) -> None:
        self._torch = load_torch("gloo")
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self._rendezvous, self._select = rendezvous, select
        self._selector = select(rendezvous.size, cores=0)
        self._timeout = timeout
        self._made = 0  # groups so far, which all ranks count alike
        self._raised = ""  # by what this rank closes
        self._groups: weakref.WeakSet[Gloo] = weakref.WeakSet()
        self._trouble = Trouble(rendezvous)
        self._queue = CallQueue()
        self._group: HeldGroup | None = connected(self._torch, rendezvous, timeout)
        self._back: HeldGroup | None = None  # a second line, see `_both_ways`
        self._messages = GlooPointToPoint(
            self._torch, self._group, self.rank, self.size, self._explain, self._trouble.has_left
        )
        self._agreement = GlooAgreement(self._torch, self.size)
        self._own = GlooCalls(self._torch, self.rank, self.size)
        self._walk = OverMessages(self.rank, self.slot)
        _unclosed.add(self)

    @classmethod
    def start(
        cls, size: int, body: Callable[[Engine], Any], *, select: Select, timeout: float
    ) -> list[Any]:
        """Fork the ranks, and have the library connect them."""

        def be_rank(at: StoreRendezvous) -> bytes:
            engine = cls(at, select, timeout=timeout)
            try:
                result: bytes = body(engine)
            except BaseException as error:
                engine.fail("failed", f"{type(error).__name__}: {error}")
                raise
            return result

        return fork_at(size, be_rank)

    @classmethod
    def join(
        cls, place: JobPlace, store: OpenStore = no_store, *, select: Select, timeout: float
    ) -> Engine:
        """Connect the ranks by the store of their job."""
        name = cls.__name__.lower()
        if place.by == "mpi":
            raise InvalidArgumentError(
                f"mpirun started these ranks, but the engine {name} needs torch's store. Start "
                f"with `roundelay run` or torchrun, or use engine='mpi'."
            )
        several = place.by == "store"
        at = rendezvous_at(store(), place.rank, place.job.size, several_hosts=several)
        return cls(at.within(name), select, timeout=timeout)

    def _limit_waiting(self, limit: float) -> None:
        for group in filter(None, (self._open(), self._back)):
            group._set_default_timeout(seconds(limit))  # noqa: SLF001 - there is no other name

    def run(self, call: CollectiveCall, algorithm: str | None) -> None:
        """Have Gloo do it, or walk a schedule over Gloo's messages."""
        described = self._described(call, algorithm)
        self._queue.run(lambda: self._do(described, algorithm), str(described.signature))

    def begin(self, call: CollectiveCall, algorithm: str | None) -> QueuedCall:
        """Run the call on a thread, after those that were started before."""
        self._open()
        described = self._described(call, algorithm)
        return self._queue.start(lambda: self._do(described, algorithm))

    def _described(self, call: CollectiveCall, algorithm: str | None) -> CollectiveCall:
        """Note on the call what others will see, while the user's line can be seen."""
        return (
            call
            if call.signature
            else replace(call, signature=signature_of(call, algorithm, (self.rank,)))
        )

    def _do(self, call: CollectiveCall, algorithm: str | None) -> None:
        group = self._open()
        with self._watched():
            done = self._agreement.settle(group, call, algorithm)
            if done or (algorithm is None and self._own.run(group, call)):
                return
            self._both_ways(call.nbytes)
            self._walk.run(call, self._selector.schedule_for(call, algorithm))

    def _both_ways(self, nbytes: int) -> None:
        """Give two ranks a line for each direction: Gloo's threads read or write one, not both."""
        if self.size == TWO and nbytes >= BETWEEN_TWO_FROM and self._back is None:
            self._back = connected(self._torch, self._rendezvous.within("back"), self._timeout)

    def waiting(self) -> AbstractContextManager[None]:
        """See meanwhile whether the others give signs of life."""
        return self._trouble.waiting()

    def slot(self, data: Array, other: int, *, sends: bool) -> SlotRequest:
        """Send or receive bytes in the order of a schedule, apart from users' messages."""
        tensor = as_tensor(self._torch, data)
        down = (self.rank > other) == sends
        group = self._back if down and self._back is not None else self._open()
        post = group.send if sends else group.recv
        return SlotRequest(post([tensor], other, WALK), tensor)

    def post(self, message: MessageCall) -> MessageRequest:
        """Announce the message, or ask for one; threads take what comes."""
        self._open()
        with self._watched():
            return GlooMessageRequest(
                self._messages.post(message, self._timeout), lambda: self._timeout, self._watched
            )

    def group(self, ranks: Sequence[int]) -> Self | None:
        """Connect these ranks once more, among themselves."""
        self._open()
        self._made += 1
        if self.rank not in ranks:
            return None
        group = self._at(self._rendezvous.within(f"group/{self._made}/{ranks[0]}", ranks))
        self._groups.add(group)
        return group

    def _at(self, rendezvous: StoreRendezvous) -> Self:
        """Return an engine of the same kind at another rendezvous."""
        return type(self)(rendezvous, self._select, timeout=self._timeout)

    def fail(self, word: str, text: str) -> None:
        """Tell the others by what this rank ends."""
        if self._group is not None:
            how = f"failed: {text}" if word == "failed" else f"was {word}."
            self._trouble.tell(CommunicationError(f"Rank {self.rank} {how}"))
            self._hang_up()

    def end_calls(self, how: str, *, together: bool, why: str = "") -> None:
        """Compare the end as a last call; all before it were compared when they were made."""
        self._raised = why
        for group in list(self._groups):
            group.end_calls(how, together=False, why=why)
        if not together or self._group is None or self._trouble.told is not None:
            return
        signature = end_signature((self.rank,), why)
        own = (PeerLost,) if why else ()  # what is on its way already
        with contextlib.suppress(CollectiveTimeout, *own):  # who ends late does no harm
            self._queue.run(lambda: self._agree_on(signature))

    def _agree_on(self, signature: CallSignature) -> None:
        with self._watched():
            self._agreement.agree(self._open(), signature)

    def close(self) -> None:
        """Say goodbye, in smaller groups too, once all that was begun is over."""
        for group in list(self._groups):
            group.close()
        if self._group is None:
            return
        self._queue.run(lambda: None)
        if self._trouble.told is None:
            self._trouble.leave(self._raised)
            self._messages.close(self._timeout)
        self._hang_up()

    def _hang_up(self) -> None:
        """Let go of the group: neither others nor threads, ours or Gloo's, wait for anything."""
        _unclosed.discard(self)
        groups = [group for group in (self._group, self._back) if group is not None]
        self._group = self._back = None
        if not groups:
            return
        if self._messages.listens or self._queue.busy or self._trouble.told is not None:
            for group in groups:
                self._cut(group)
        self._queue.run(lambda: None)  # after all that were started
        self._messages.hung_up()
        for group in groups:
            group.let_go()
        if not self._rendezvous.ranks:  # the whole call, not a group of some
            with contextlib.suppress(StoreLost):
                self._rendezvous.store.in_hurry().rest(self.rank)

    def _cut(self, group: HeldGroup) -> None:
        """Cut the lines to all others."""
        cut_lines(self._torch, group, self.rank, self.size)

    def _open(self) -> HeldGroup:
        if self._group is None:
            self._trouble.check()
            raise InvalidArgumentError("This communicator is closed.")
        return self._group

    def _watched(self) -> AbstractContextManager[None]:
        return self._trouble.watched(self._timeout)

    def _explain(self, error: BaseException) -> CommunicationError:
        return self._trouble.explain(error, self._timeout)


#: A thread that still waits in C++ when the interpreter ends would take the process down with it.
_unclosed: weakref.WeakSet[Gloo] = weakref.WeakSet()


@atexit.register
def _close_the_rest() -> None:
    for engine in list(_unclosed):
        engine._hang_up()  # noqa: SLF001 - our own


def cut_lines(torch: Any, group: HeldGroup, rank: int, size: int) -> None:
    """End all that waits for something in a group of Gloo's, on this rank and on the others."""
    # A receive that comes too late makes Gloo close every line; from who is gone, none does.
    for other in range(1, size):
        with contextlib.suppress(RuntimeError):
            late = group.recv([torch.empty(1)], (rank + other) % size, NOBODY)
            late.wait(timedelta(milliseconds=1))


def connected(torch: Any, rendezvous: StoreRendezvous, timeout: float) -> HeldGroup:
    """Return the process group once all ranks are in it."""
    kind = torch.distributed.ProcessGroupGloo
    store = signed_store(torch.distributed, rendezvous.store, timeout)
    try:
        options: Any = seconds(timeout)
        if rendezvous.address is not None:  # or by GLOO_SOCKET_IFNAME
            options = kind._Options()  # noqa: SLF001 - torch has no other name for them
            options._devices = [kind.create_device(hostname=rendezvous.address)]  # noqa: SLF001
            options._timeout = seconds(timeout)  # noqa: SLF001
        group = HeldGroup(kind(store, rendezvous.rank, rendezvous.size, options), store)
        # Who needs nothing of the others may close at once, while they still connect.
        group.barrier().wait()
        return group  # noqa: TRY300 - what has come to pass
    except (RuntimeError, TimeoutError) as error:
        raise RendezvousError(
            f"rank {rendezvous.rank} of {rendezvous.size} could not connect to the others by Gloo "
            f"within {timeout:g} s: {first_line(error)}. See whether all of them started; if a "
            f"host has several networks, name the one to use by GLOO_SOCKET_IFNAME."
        ) from None
