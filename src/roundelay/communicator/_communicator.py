"""The communicator: every collective on every kind of array, through one object per rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple, NoReturn, Self
from weakref import WeakSet

import numpy as np

from roundelay.arguments import seconds as read_seconds
from roundelay.communicator.call_trace import CallTrace
from roundelay.communicator.custom_ops import CustomOps
from roundelay.communicator.groups import GroupCalls, not_over
from roundelay.communicator.memory import require_host
from roundelay.communicator.objects import ObjectCalls
from roundelay.communicator.start import Handle, Start
from roundelay.engines import CollectiveCall, Engine, no_fast_path
from roundelay.errors import InvalidArgumentError
from roundelay.processes.death import note_handled, raised_now
from roundelay.records import Trace
from roundelay.reductions import Array, Op


class Traffic(NamedTuple):
    """Bytes that one rank has exchanged with the others."""

    sent: int
    received: int


class Communicator(GroupCalls, ObjectCalls):
    """A group of ranks that call the same collectives in the same order.

    Buffers are numpy arrays, CPU tensors, or anything with the buffer protocol or DLPack; results
    are of the kind that came in. Calls that go wrong raise on every rank and break the group.
    """

    #: Spent in collectives so far, but for those on the fast path; work, and waiting for others.
    seconds = 0.0
    _asking: Array | int = 0  # bytes that asking for traffic cost, by rank
    _label = 0  # of its calls, where others make calls among the same ranks

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.rank, self.size = engine.rank, engine.size
        self._fast_path = engine.fast_path
        self._quick = engine.fast_path is not no_fast_path
        self._goodbyes: list[Callable[[], None]] = []
        self._followers: WeakSet[Communicator] = WeakSet()  # whose timeout is this one's
        self._objects_sent = count()
        self._call_trace: CallTrace | None = None  # where the engine does not take down its calls
        note_handled()  # who makes a communicator goes on

    @cached_property
    def start(self) -> Start:
        """The collectives, each in the background: `comm.start.all_reduce(x)`."""
        return Start(self, self._build)

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}>"

    @property
    def timeout(self) -> float:
        """Seconds without progress after which a call gives up on a rank."""
        return self._engine.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._engine.timeout = read_seconds("timeout", seconds)
        for group in self._followers:
            with suppress(InvalidArgumentError):  # it is closed
                group.timeout = seconds

    def follow_timeout(self, other: Communicator) -> None:
        """Give up when `other` does, also once that is changed: for groups that no user sees."""
        if other is not self:
            other._followers.add(self)

    @property
    def trace(self) -> Trace | None:
        """What takes down what this rank does, where RD_TRACE asks for it; else None."""
        return self._engine.tracer

    def start_trace(self, trace: Trace) -> None:
        """Take down from now on what this rank does, here and in groups made from this one."""
        self._engine.start_trace(trace)
        if not self._engine.traces_calls:
            self._call_trace = CallTrace(trace, 0, self.rank, self.size)

    def traffic(self) -> list[Traffic] | None:
        """Return what every rank has sent and received so far, as counted, not as predicted.

        Every rank calls it. None where the engine does not count: on other libraries' transports.
        """
        before = self._engine.moved()
        if before is None:
            return None
        mine = np.array(before, np.int64)
        taken, given = self._all_gather_for("traffic", mine - self._asking).swapaxes(0, 1)
        self._asking = self._asking + np.array(self._engine.moved(), np.int64) - mine
        return [
            Traffic(int(given[rank].sum() + taken[:, rank].sum()),
                    int(taken[rank].sum() + given[:, rank].sum()))
            for rank in range(self.size)
        ]  # fmt: skip

    def labelled(self, label: int) -> Self:
        """Return this communicator with a label on each of its calls.

        Ranks whose calls have different labels are told so, though all else of these is alike.
        """
        twin = copy.copy(self)
        vars(twin).pop("start", None)
        twin._label, twin._parent, twin._goodbyes = label, self, []
        twin._fast_path = self._engine.labelled_path(label)
        return twin

    def shares_ranks(self, other: Communicator) -> bool:
        """Say whether another one calls the same ranks: it is this one, or has other labels."""
        return self._engine is other._engine

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Stay the same: a copy of what has it is on the same ranks."""
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"A communicator can't be pickled: it is rank {self.rank} of {self.size} running ones. "
            f"Of a model that has one, save rd.full_state_dict(model), or use rd.save."
        )

    def before_close(self, action: Callable[[], None]) -> None:
        """Have `action` called when this communicator, or one it was made from, closes."""
        level: Communicator | None = self
        while level is not None:
            level._goodbyes = [*filter(not_over, level._goodbyes), action]
            level = level._parent

    def close(self) -> None:
        """Make no more calls, and raise `CollectiveMismatch` if the ranks did not make the same.

        Waits for what was begun. The communicator of all ranks also waits for all of them to
        close, but no longer than `timeout`. A group waits for nobody: the last rank to close it
        compares. While an exception is under way, as in `finally`, ranks that still need this one
        hear that it failed by that exception, and nothing is raised over it here.
        """
        self.end("closed", together=True)

    def end(self, how: str, *, together: bool) -> None:
        """Close, by one of `ENDINGS`; without `together` wait for no other rank."""
        raised = raised_now() if how == "closed" else None
        if raised is not None:
            how = "raised" if raised.word == "failed" else "cancelled"
        try:
            while self._goodbyes:
                self._goodbyes.pop()()
        finally:  # whatever is raised, all of it is done
            try:
                together = self._parent is None and together
                why = "" if raised is None else raised.text
                self._engine.end_calls(how, together=together, why=why)
            finally:
                try:
                    self._engine.close()
                finally:
                    self._fast_path = (
                        self._engine.fast_path
                    )  # which now refuses; the long way can say why

    # ---- how a call runs

    def _for_engine(self, call: CollectiveCall) -> CollectiveCall:
        """Return a call as the engine takes it."""
        if not self._engine.devices:
            require_host(call.collective, (call.input, call.output))
        call.label = call.label or self._label
        return self._engine.narrowed(call) if call.wide and not self._engine.rounds else call

    def _run(self, call: CollectiveCall, algorithm: str | None = None) -> Any:
        call = self._for_engine(call)
        began = perf_counter()
        if self._call_trace is None:
            self._engine.run(call, algorithm)
        else:
            self._call_trace.run(self._engine, call, algorithm)
        self.seconds += perf_counter() - began
        return call.finish()

    def _custom_ops(self, op: Op) -> CustomOps:
        del op
        return CustomOps(self)

    def _begin(self, call: CollectiveCall, algorithm: str | None) -> Handle:
        call = self._for_engine(call)
        if self._call_trace is None:
            return Handle(self, self._engine.begin(call, algorithm), call.finish)
        request = self._call_trace.begin(self._engine, call, algorithm)
        return Handle(self, request, call.finish)
