"""A rank that runs schedules for another process: told what to run, and what it brings to it.

What folds by a function of the user's own asks that process, which alone has it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial

import numpy as np

from roundelay.engines._base import Engine
from roundelay.engines._call import CollectiveCall, MessageCall, Request
from roundelay.engines._over_messages import Fold, OverMessages
from roundelay.engines._run_schedule import RankInput
from roundelay.engines._selector import Selector, SizeClass
from roundelay.processes.channel import Channel
from roundelay.processes.wire import decode, encode
from roundelay.reductions import Array
from roundelay.schedule import Schedule, from_json

DONE, FOLD = b"+", b"?"  # how an answer begins
TIMEOUT_S = 60.0


class ToldSchedules(Selector):
    """Chooses the schedule that a rank was told last; it knows no algorithms."""

    algorithms = ("schedule",)

    def __init__(self) -> None:
        self.size = 0  # of whatever group
        self._name, self._told = "", list[Schedule]()

    def __call__(self, size: int, *, cores: int | None = None) -> ToldSchedules:
        """Be the same for every number of ranks."""
        del cores
        self.size = size
        return self

    def tell(self, name: str, schedule: Schedule) -> None:
        """Know this one from now on, by a name that no other has."""
        self._name, self._told = name, [schedule]

    def for_size(self, size: int) -> ToldSchedules:
        """Be the same for a group."""
        return self(size)

    def choose(self, call: CollectiveCall, algorithm: str | None) -> str:
        """Return the name that was told."""
        del call, algorithm
        return self._name

    def size_classes(self, collective: str) -> Sequence[SizeClass]:
        """Have no plain calls."""
        del collective
        return ()

    def number(self, name: str) -> int:
        """Return the only number."""
        del name
        return 0

    def schedule(self, name: str, root: int) -> Schedule:
        """Return what was told."""
        del name, root
        return self._told[0]


def serve(engine: Engine, schedules: ToldSchedules, address: str) -> None:
    """Run schedules for the process that listens at `address`, until it asks no more."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        channel = Channel(line.detach())
    try:
        channel.send(str(engine.rank).encode())
        while request := channel.receive():
            name, text, brings, array, op, own, counts = decode(request)
            if text:
                schedules.tell(name, from_json(text))
            brought = RankInput(array if brings else None, array.dtype, op, counts)
            ask = _asking(channel) if own else None
            channel.send(DONE + encode(_run(engine, schedules.schedule(name, 0), brought, ask)))
        engine.close()
    finally:
        channel.close()


def _run(engine: Engine, schedule: Schedule, brought: RankInput, ask: Fold | None) -> Array | None:
    """Run a schedule on one rank; return its output, None where the contract leaves it nothing."""
    collective, counts, dtype = schedule.collective, brought.counts, brought.dtype
    after = collective.after(schedule.size, schedule.root, engine.rank)
    output = np.empty(sum(counts[block] for block in after), dtype) if after else None
    array, op = brought.array, brought.op
    if collective.idempotent:  # nothing is brought, and nothing comes, but news of all
        array, op = output, "max"
    even = len(set(counts)) == 1
    call = CollectiveCall(
        collective.name,
        (dtype if dtype.names is None else dtype["value"]).name,
        dtype.itemsize,
        counts[0] if even else sum(counts),
        sum(counts) * dtype.itemsize,
        lambda: None,
        array,
        output,
        op=op,
        root=schedule.root,
        counts=() if even else counts,
    )
    if ask is None:
        engine.run(call, schedule.name)  # by name, or a library would take its own
    else:
        OverMessages(engine.rank, partial(_post, engine)).run(call, schedule, ask)
    return output


def _post(engine: Engine, data: Array, other: int, *, sends: bool) -> Request:
    return engine.post(MessageCall(data, "uint8", other, 0, sends))


def _asking(channel: Channel) -> Fold:
    """Return a fold by a function that only the program has."""

    def ask(operands: Sequence[Array], _: bool, __: Array | None) -> Array:  # noqa: FBT001 - a fold's form
        channel.send(FOLD + encode(list(operands)))
        answer = channel.receive()
        if answer is None:
            raise SystemExit(1)  # the program has ended
        folded: Array = decode(answer)
        return folded

    return ask
