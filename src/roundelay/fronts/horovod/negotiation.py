"""The negotiation of named operations: what all members have submitted runs, in one order.

Every rank tells rank 0 what it submits, in a few numbers; rank 0 tells the members what runs next.
Whoever waits for an operation listens, and runs what is decided; a thread does where nobody waits.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveTimeout, CommunicationError, InvalidArgumentError
from roundelay.fronts.horovod.control import QUIET, Control, CoordinatorMessage, RankMessage
from roundelay.fronts.horovod.coordinator import (
    JOINED,
    SUBMIT,
    Coordinator,
    Decision,
    Outcome,
    Said,
)
from roundelay.fronts.horovod.errors import HorovodInternalError
from roundelay.fronts.horovod.operation import (
    KINDS,
    Operation,
    differences,
    kinds_differ,
    line_of,
    lines_told,
    number_of,
)
from roundelay.fronts.horovod.turns import Turns, refuse_nested
from roundelay.processes.death import raised_now

__all__ = ["Negotiation"]

#: Seconds of waiting after which a rank says so: others may wait for that name as another kind.
PATIENCE_S = 1.0
#: After so many it tells its user for whom it waits, as every call of the library does.
LATE_S = 5.0
FAILING = Outcome.FAIL, Outcome.MISMATCH, Outcome.KINDS_DIFFER
MOST_NAMED = 5  # operations, in a warning
NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class Negotiation:
    """One rank's part: submits operations, and runs what is decided."""

    def __init__(self, comm: Communicator, stand_in: Callable[[Any], Operation]) -> None:
        everyone = range(comm.size)
        control, data = comm.group(everyone), comm.group(everyone)
        if control is None or data is None:
            raise InvalidArgumentError("hvd.init needs a communicator of which this is a rank.")
        self.rank, self._timeout = comm.rank, min(comm.timeout, threading.TIMEOUT_MAX / 4)
        self._control = Control(control)
        self.comms: dict[int, Communicator] = {0: data}
        self.members: dict[int, tuple[int, ...]] = {0: tuple(everyone)}
        self._stand_in = stand_in  # for a rank that has joined: an operation with nothing in it
        self._pending: dict[tuple[int, int], Operation] = {}  # not decided yet
        self._taken: dict[tuple[int, int], Operation] = {}  # nobody has waited for it yet
        self._last: Operation | None = None  # that was submitted
        self._lock = threading.Lock()
        self._broken: BaseException | None = None
        self._coordinator = Coordinator(comm.size, self._timeout) if comm.rank == 0 else None
        if self._coordinator is not None:
            self._coordinator.members = self.members
        self._removed: list[int] = []  # process sets, since the last decisions
        self._next_set = 1
        self.epoch = 0  # how often all have joined
        self._leaving = self._missed = False
        self._fail = comm._engine.fail  # noqa: SLF001 - our own
        self._unheard: list[Operation] = []  # failed, and nobody has waited for them yet
        self._turns = Turns(self._step, self._needed, self._break)

    # ---- for callers

    def submit(self, operation: Operation) -> Operation:
        """Tell the others that this rank is ready for it."""
        key = operation.key = operation.process_set, number_of(operation.kind + operation.name)
        unnamed = operation.name.startswith("noname.")
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
            if not unnamed:
                self._taken[key] = operation
        # Barriers have nothing that could be mixed up, and process sets are compared by ranks.
        paired = unnamed and operation.kind not in ("barrier", "process_set")
        line = number_of(line_of(operation.place)) if paired else 0
        terms, kind = number_of(operation.terms), NUMBERS[operation.kind]
        called = 0 if unnamed else number_of(operation.name)
        self._control.say(RankMessage(self.rank, SUBMIT, *key, terms, kind, line, called))
        self._turns.ring()
        return operation

    def join(self) -> int:
        """Bring zeros to what others all-reduce until all have joined; return who was last."""
        operation = Operation("join", "", 0, (), lambda _: None)
        with self._lock:
            self._refuse_broken()
            self._pending[JOINED] = operation
        self._say(Said.JOIN)
        operation.waited = True
        if not self._turns.take(operation.done):
            self._control.flush()
            while not operation.wait(min(QUIET, threading.TIMEOUT_MAX)):
                pass
        last: int = operation.result()
        return last

    def wait(self, operation: Operation) -> Any:
        """Return its result, or raise what went wrong."""
        operation.waited = True
        if not operation.done():
            self._send_first()
            soon = min(PATIENCE_S, self._timeout / 2)
            times = {Said.WAITS: soon, Said.WONDERS: LATE_S, Said.STALLED: self._timeout}
            alarms = [
                (seconds, partial(self._tell_of, operation, said))
                for said, seconds in times.items()
                if seconds < self._timeout or said == Said.STALLED
            ]
            if not self._turns.take(operation.done, alarms):
                self._control.flush()  # rank 0 wakes up who listens
                self._await(operation, alarms)
        if not operation.done():
            raise CollectiveTimeout(f"{operation} has not ended within {self._timeout:g} s.")
        if self._taken.get(operation.key) is operation:
            del self._taken[operation.key]
        return operation.result()

    def _await(
        self, operation: Operation, alarms: Sequence[tuple[float, Callable[[], None]]]
    ) -> None:
        """Wait while another thread listens, and call each of `alarms` in its time."""
        waited = 0.0
        for seconds, alarm in alarms:
            if operation.wait(seconds - waited):
                return
            alarm()
            waited = seconds
        operation.wait(self._timeout)  # it fails, or is under way

    def _send_first(self) -> None:
        """Send what was said before all else: the rest of waiting is done while it travels."""
        try:
            sent = self._control.flush()
        except BaseException as error:
            self._break(error)
            raise
        if not sent:
            refuse_nested()

    def leave(self) -> None:
        """Submit nothing more, and wait until the others do not either.

        If an exception is under way, that is a failure to those who need this rank.
        """
        raised = raised_now()
        if self._turns.alive() and self._broken is None:
            with suppress(CommunicationError):  # a broken group is left as well
                self._say(Said.LEAVE, raised is not None)
            self._leaving = True
            self._turns.end(self._timeout)
        if self._missed and raised is not None:
            self._fail(*raised)
        for comm in self.comms.values():
            comm.close()
        self._control.close()
        if raised is None:  # else there is worse to tell
            self._tell_unheard()

    # ---- how it goes

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _say(self, said: Said, *numbers: int) -> None:
        self._control.say(RankMessage(self.rank, said, *numbers))

    def _tell_of(self, operation: Operation, said: Said) -> None:
        self._say(said, *operation.key)
        self._control.flush()

    def _tell_unheard(self) -> None:
        """Warn of operations that failed while nobody waited for them; a broken group is told."""
        unheard = [op for op in (*self._unheard, *self._pending.values()) if not op.waited]
        if unheard and self._broken is None:
            named = ", ".join(f"{op} at {line_of(op.place)}" for op in unheard[:MOST_NAMED])
            more = len(unheard) - MOST_NAMED
            warnings.warn(
                f"Rank {self.rank} shuts down hvd with operations that never ran and that it has "
                f"not waited for: {named}{f' and {more} more' if more > 0 else ''}. Submit them on "
                f"every rank, and wait by hvd.synchronize.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _needed(self) -> bool:
        """Tell whether anybody must listen: rank 0 always, others while something is pending."""
        if self._broken is not None:
            return False
        return self._coordinator is not None or bool(self._pending) or self._leaving

    def _break(self, error: BaseException) -> None:
        """Fail all that is pending: nobody knows any more what the others will run."""
        if not isinstance(error, Exception):
            error = CommunicationError(
                f"Rank {self.rank} was interrupted in the midst of hvd's operations: {error!r}."
            )
        with self._lock:
            self._broken = error
        with suppress(KeyError):  # there is none left
            while True:  # one at a time: who takes it out of there ends it, and nobody else does
                self._pending.popitem()[1].finish(None, error)
        self._turns.stop()

    def _step(self, alone: bool) -> bool:  # noqa: FBT001
        """Hear once, and act; tell whether somebody waited for what has ended."""
        patience = QUIET if alone or JOINED in self._pending else 3 * self._timeout
        if self._coordinator is None:
            return self._act_on(self._control.listen(patience))
        decided = [
            decision
            for entry in self._control.hear(patience)
            for decision in self._coordinator.heard(entry)
        ]
        waited = bool(decided) and self._act_on(self._told(decided))
        while self._removed:
            waited |= self._act_on(self._told(self._coordinator.removed(self._removed.pop())))
        return waited

    def _told(self, decided: list[Decision]) -> list[CoordinatorMessage]:
        """Tell other ranks what was decided; return what concerns this one."""
        if len(decided) == 1:
            [(to, *what)] = decided
            same = [CoordinatorMessage(*what)]  # type: ignore[arg-type] # mypy loses their types
            for rank in to:
                if rank:
                    self._control.tell(rank, same)
            return same if 0 in to else []
        by_rank: dict[int, list[CoordinatorMessage]] = {}
        for to, outcome, process_set, name, argument, text in decided:
            told = CoordinatorMessage(outcome, process_set, name, argument, text)
            for rank in to:
                by_rank.setdefault(rank, []).append(told)
        mine = by_rank.pop(0, [])
        for rank, some in by_rank.items():
            self._control.tell(rank, some)
        return mine

    def _act_on(self, decided: list[CoordinatorMessage]) -> bool:
        waited = False
        for told in decided:
            waited |= self._act(told)
        return waited

    def _act(self, decision: CoordinatorMessage) -> bool:
        """Do what has been decided, and tell whether somebody waited for it."""
        outcome, process_set, name, argument, text = decision
        if outcome in (Outcome.END, Outcome.MISSED):
            self._missed = outcome == Outcome.MISSED
            self._turns.stop()
            return False
        if outcome == Outcome.LATE:
            self._tell_late(self._pending.get((process_set, name)), text)
            return False
        operation = self._pending.pop((process_set, name), None)
        if outcome == Outcome.ALL_JOINED and operation is not None:
            self.epoch += 1
            operation.finish(argument)
            return True
        comm = self.comms.get(process_set)
        if outcome == Outcome.RUN_WITH_JOINED and comm is not None:
            terms = comm.broadcast_object(None if operation is None else operation.terms, argument)
            operation = operation or self._stand_in(terms)
        if operation is None:
            raise HorovodInternalError("An operation was decided that this rank did not submit.")
        try:
            if comm is None or outcome in FAILING:
                error = HorovodInternalError(self._why(operation, outcome, comm, text))
                error.ended = argument - 1 if argument else None
                operation.finish(None, error)
            else:
                if outcome == Outcome.RUN and argument:
                    self._warn(operation, comm)
                operation.finish(operation.run(comm))
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            operation.finish(None, error)
            _raise_if_broken(error)
        if not operation.waited and operation.failed():
            self._unheard.append(operation)
        return operation.waited

    def _tell_late(self, operation: Operation | None, text: str) -> None:
        """Say for whom this rank waits, unless that has just ended."""
        if operation is not None:
            sys.stderr.write(
                f"roundelay: rank {self.rank} has waited {LATE_S:.0f} s in {operation} at "
                f"{line_of(operation.place)}: {text}; it gives up after {self._timeout:g} s.\n"
            )

    def _why(self, operation: Operation, outcome: int, comm: Communicator | None, text: str) -> str:
        """Return why an operation fails; members tell one another what rank 0 does not know."""
        if comm is None or outcome == Outcome.FAIL:
            return f"{operation}: {text}"
        line, members = line_of(operation.place), self.members[operation.process_set]
        if outcome == Outcome.KINDS_DIFFER:
            kinds = comm.all_gather_object((operation.kind, line))
            return kinds_differ(operation.name, members, kinds)
        return differences(str(operation), members, comm.all_gather_object((operation.terms, line)))

    def _warn(self, operation: Operation, comm: Communicator) -> None:
        """Tell that ranks made one call without a name on different lines, perhaps by mistake."""
        told = comm.all_gather_object(line_of(operation.place))
        where = lines_told(self.members[operation.process_set], told)
        warnings.warn(
            f"One {operation.kind} without a name is made of calls by {where}. Such calls pair up "
            f"by their number: if these don't belong together, a rank has made one more, or one "
            f"less. Give them name=.",
            RuntimeWarning,
            stacklevel=2,
        )

    # ---- process sets, made and ended by operations of their own

    def add_set(self, ranks: tuple[int, ...]) -> int:
        """Make a group of these ranks; every rank does so at the same point, when it is decided."""
        number, self._next_set = self._next_set, self._next_set + 1
        comm = self.comms[0].group(ranks)
        self.members[number] = ranks
        if comm is not None:
            self.comms[number] = comm
        return number

    def remove_set(self, number: int) -> None:
        """Let go of a group, when that is decided; what still waits in it fails."""
        del self.members[number]
        comm = self.comms.pop(number, None)
        if comm is not None:
            comm.close()
        self._removed.append(number)


def _raise_if_broken(error: BaseException) -> None:
    """Raise what breaks the group, and not one operation."""
    one = isinstance(error, HorovodInternalError) or not isinstance(error, CommunicationError)
    if not one or not isinstance(error, Exception):
        raise error
