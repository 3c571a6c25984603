"""The negotiation of named operations: what all members have submitted runs, in one order.

Every rank tells rank 0 what it submits, in a few numbers; rank 0 tells the members what runs next,
and each runs that on its own thread. Nobody looks around for work: threads wait for messages in the
native core, or in whatever the engine waits by.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from roundelay.communicator import ANY, Communicator
from roundelay.errors import CollectiveTimeout, CommunicationError, InvalidArgumentError
from roundelay.fronts.horovod.coordinator import JOINED, Coordinator, Decision, Outcome, Said
from roundelay.fronts.horovod.errors import HorovodInternalError
from roundelay.fronts.horovod.operation import KINDS, Operation, differences, number_of

__all__ = ["Negotiation"]

SAID, DECIDED, TEXT = 1, 2, 3  # tags
NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
QUIET = 1e8  # seconds: who waits for work waits for ever, and is not surprised


class Negotiation:
    """One rank's part: submits operations, and runs what is decided, on a thread of its own."""

    def __init__(self, comm: Communicator, stand_in: Callable[[Any], Operation]) -> None:
        everyone = range(comm.size)
        control, data = comm.group(everyone), comm.group(everyone)
        if control is None or data is None:
            raise InvalidArgumentError("hvd.init needs a communicator of which this is a rank.")
        self._control, self._timeout = control, comm.timeout
        control.timeout = QUIET
        self.comms: dict[int, Communicator] = {0: data}
        self.members: dict[int, tuple[int, ...]] = {0: tuple(everyone)}
        self._stand_in = stand_in  # for a rank that has joined: an operation with nothing in it
        self._pending: dict[tuple[int, int], Operation] = {}  # not decided yet
        self._taken: dict[tuple[int, int], Operation] = {}  # nobody has waited for it yet
        self._last: Operation | None = None  # that was submitted
        self._lock = threading.Lock()
        self._broken: BaseException | None = None
        self._coordinator = Coordinator(comm.size) if comm.rank == 0 else None
        if self._coordinator is not None:
            self._coordinator.members = self.members
        self._next_set = 1
        self.epoch = 0  # how often all have joined
        self._thread = threading.Thread(target=self._serve, name="roundelay-horovod", daemon=True)
        self._thread.start()

    # ---- for callers

    def submit(self, operation: Operation) -> Operation:
        """Tell the others that this rank is ready for it."""
        key = operation.key = operation.process_set, number_of(operation.kind + operation.name)
        with self._lock:
            self._refuse_broken()
            earlier = self._taken.get(key)
            again = earlier is not None and earlier is self._last
            if earlier is not None and (not earlier.done() or (again and earlier.lingers())):
                raise InvalidArgumentError(
                    f"{operation} is already under way on this rank: a name may be submitted again "
                    f"once synchronize has returned. Give each operation a name of its own."
                )
            self._pending[key] = self._last = operation
            if not operation.name.startswith("noname."):
                self._taken[key] = operation
        self._say(Said.SUBMIT, *key, number_of(operation.terms), NUMBERS[operation.kind])
        return operation

    def join(self) -> int:
        """Bring zeros to what others all-reduce until all have joined; return who was last."""
        operation = Operation("join", "", 0, (), lambda _: None)
        with self._lock:
            self._refuse_broken()
            self._pending[JOINED] = operation
        self._say(Said.JOIN)
        while not operation.wait(QUIET):
            pass
        last: int = operation.result()
        return last

    def wait(self, operation: Operation) -> Any:
        """Return its result, or raise what went wrong."""
        if not operation.wait(min(self._timeout, threading.TIMEOUT_MAX)):
            self._say(Said.STALLED, *operation.key)
            operation.wait(min(self._timeout, threading.TIMEOUT_MAX))  # it fails, or is under way
        if not operation.done():
            raise CollectiveTimeout(f"{operation} has not ended within {self._timeout:g} s.")
        if self._taken.get(operation.key) is operation:
            del self._taken[operation.key]
        return operation.result()

    def leave(self) -> None:
        """Submit nothing more, and wait until the others do not either."""
        if self._thread.is_alive() and self._broken is None:
            self._say(Said.LEAVE)
            self._thread.join(min(self._timeout, threading.TIMEOUT_MAX))
        for comm in (*self.comms.values(), self._control):
            comm.close()

    # ---- how it goes

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _say(self, said: Said, *numbers: int) -> None:
        padding = (0,) * (4 - len(numbers))
        words = np.array((self._control.rank, said, *numbers, *padding), np.int64)
        self._control.send(words, 0, SAID)

    def _serve(self) -> None:
        try:
            if self._coordinator is None:
                self._follow()
            else:
                self._decide(self._coordinator)
        except BaseException as error:  # noqa: BLE001 - told to whoever waits, and to who comes later
            with self._lock:
                self._broken = error
                pending = [*self._pending.values()]
                self._pending.clear()
            for operation in pending:
                operation.finish(None, error)

    def _decide(self, coordinator: Coordinator) -> None:
        words = np.zeros(6, np.int64)
        while True:
            self._control.recv(words, ANY, SAID)
            for decision in coordinator.heard(*words.tolist()):
                told = np.array([*decision[1:5], len(decision.text.encode())], np.int64)
                for rank in decision.to:
                    if rank:
                        self._control.send(told, rank, DECIDED)
                        if decision.text:
                            text = np.frombuffer(decision.text.encode(), np.uint8)
                            self._control.send(text, rank, TEXT)
                if 0 in decision.to and self._act(decision):
                    return

    def _follow(self) -> None:
        words = np.zeros(5, np.int64)
        while True:
            self._control.recv(words, 0, DECIDED)
            outcome, process_set, name, argument, length = words.tolist()
            text = b""
            if length:
                text = self._control.recv(np.empty(length, np.uint8), 0, TEXT).tobytes()
            decision = Decision((), Outcome(outcome), process_set, name, argument, text.decode())
            if self._act(decision):
                return

    def _act(self, decision: Decision) -> bool:
        """Do what has been decided, and tell whether it was the end."""
        _, outcome, process_set, name, argument, text = decision
        if outcome == Outcome.END:
            return True
        if outcome == Outcome.ALL_JOINED:
            self.epoch += 1
            self._pending.pop(JOINED).finish(argument)
            return False
        operation = self._pending.pop((process_set, name), None)
        comm = self.comms[process_set]
        if outcome == Outcome.RUN_WITH_JOINED:
            terms = comm.broadcast_object(None if operation is None else operation.terms, argument)
            operation = operation or self._stand_in(terms)
        if operation is None:
            raise HorovodInternalError("An operation was decided that this rank did not submit.")
        try:
            if outcome == Outcome.MISMATCH:
                told = comm.all_gather_object(operation.terms)
                text = differences(str(operation), self.members[process_set], told)
            elif outcome == Outcome.FAIL:
                text = f"{operation}: {text}"
            if text:
                operation.finish(None, HorovodInternalError(text))
            else:
                operation.finish(operation.run(comm))
        except Exception as error:
            operation.finish(None, error)
            if isinstance(error, CommunicationError) and not isinstance(
                error, HorovodInternalError
            ):
                raise  # the group is broken, and not this one operation
        return False

    # ---- process sets, made and ended by operations of their own

    def add_set(self, ranks: tuple[int, ...]) -> int:
        """Make a group of these ranks; every rank does so at the same point. On the thread."""
        number, self._next_set = self._next_set, self._next_set + 1
        comm = self.comms[0].group(ranks)
        self.members[number] = ranks
        if comm is not None:
            self.comms[number] = comm
        return number

    def remove_set(self, number: int) -> None:
        """Let go of a group. On the thread."""
        del self.members[number]
        comm = self.comms.pop(number, None)
        if comm is not None:
            comm.close()
