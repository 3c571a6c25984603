"""Ranks that are broken on purpose, and what each of them has to say about it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import msgspec
import numpy as np

from roundelay import _core
from roundelay.cli._leftovers import left_behind, traces
from roundelay.communicator import Communicator
from roundelay.communicator import __file__ as communicator_file
from roundelay.communicator.selection import Selection
from roundelay.engines.shared_memory import SharedMemory
from roundelay.errors import CommunicationError
from roundelay.processes.channel import Channel
from roundelay.processes.children import Children

VICTIM = 2
CALLS_BEFORE = 20
COUNT = 1 << 18  # elements: a call takes long enough to be hit in its middle
SETTLE_S = 0.05


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A rank that is in the midst of its work."""

    pid: int


class RankError(msgspec.Struct, frozen=True, tag="told"):
    """The error that a rank met, and when, on the clock that all processes share."""

    rank: int
    at: float
    kind: str
    message: str


class Struck(msgspec.Struct, frozen=True, tag="struck"):
    """The moment in which a rank does what it should not."""

    at: float


_read = msgspec.json.Decoder(Ready | RankError | Struck).decode


class BrokenRun(msgspec.Struct, frozen=True):
    """A run that was broken: when, what every rank was told, and what is left of it."""

    at: float
    errors: list[RankError]
    left: dict[str, list[str]]

    def seconds(self) -> float:
        """Return the time from the fault to the last error; a rank that was stopped comes later."""
        heard = [each.at for each in self.errors if each.rank != VICTIM]
        return max(heard, default=self.at) - self.at


def break_run(fault: str, size: int, *, timeout: float) -> BrokenRun:
    """Let `size` processes reduce in a loop, break one, and collect what the others say."""
    before = traces()
    watch = _run(fault, size, timeout)
    errors = sorted(watch.errors, key=lambda error: error.rank)
    return BrokenRun(watch.at, errors, left_behind(before))


def _run(fault: str, size: int, timeout: float) -> _Watch:
    """Run in a frame of its own: what it holds must be gone before leftovers are looked for."""
    watch = _Watch(fault, size)

    def body(world: _core.World, rank: int, channel: Channel) -> None:
        _work(world, rank, channel, fault=fault, timeout=timeout)

    with Children(body, size, tied=True) as children:
        try:
            for rank, message in children.messages():
                if message is not None:
                    watch.hear(rank, message)
        finally:
            watch.wake()
    return watch


class _Watch:
    """Strikes when all ranks are at work, and writes down what they say."""

    def __init__(self, fault: str, size: int) -> None:
        self.at, self.errors = 0.0, list[RankError]()
        self._fault, self._size = fault, size
        self._pids: dict[int, int] = {}

    def hear(self, rank: int, message: bytes) -> None:
        """Take a message of a rank."""
        note = _read(message)
        if isinstance(note, Struck):
            self.at = note.at
        elif isinstance(note, RankError):
            self.errors.append(note)
            if len(self.errors) == self._size - 1:
                self.wake()
        else:
            self._pids[rank] = note.pid
            if len(self._pids) == self._size and self._fault in ("kill", "stop"):
                self.at = _strike(self._fault, self._pids[VICTIM])

    def wake(self) -> None:
        """Let a stopped rank go on: it hears nothing else, and must end like the others."""
        if self._fault == "stop" and VICTIM in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[VICTIM], signal.SIGCONT)


def _strike(fault: str, victim: int) -> float:
    time.sleep(SETTLE_S)  # until it is in its loop again
    at = time.monotonic()
    os.kill(victim, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    return at


def _work(world: _core.World, rank: int, channel: Channel, *, fault: str, timeout: float) -> None:
    """Be a user's program on one rank."""
    # This file plays the user, so its lines are the ones to show in errors.
    _core.set_package(str(Path(communicator_file).parent) + "/")
    comm = Communicator(SharedMemory(world, rank, Selection(world.size), timeout=timeout))
    gradients = np.ones(COUNT, np.float32)
    call = 0
    try:
        while True:
            if call == CALLS_BEFORE:
                channel.send(msgspec.json.encode(Ready(os.getpid())))
            if fault == "mismatch" and rank == VICTIM and call == 10 * CALLS_BEFORE:
                channel.send(msgspec.json.encode(Struck(time.monotonic())))
                comm.barrier()
            comm.all_reduce(gradients, op="avg")
            call += 1
    except CommunicationError as error:
        told = RankError(rank, time.monotonic(), type(error).__name__, str(error))
        channel.send(msgspec.json.encode(told))
