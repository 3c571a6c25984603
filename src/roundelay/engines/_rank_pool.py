"""Ranks that run schedules for this process: started once, asked again and again.

They find this process at a socket without a lasting name, whatever has started them: the engine's
own `start`, on a thread, or a launcher. Each is told a schedule once.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from roundelay.engines._base import Engine
from roundelay.engines._run_schedule import RankInput, ScheduleRunner
from roundelay.engines._serving import FOLD, TIMEOUT_S, ToldSchedules, serve
from roundelay.errors import RankFailed, RendezvousError
from roundelay.processes.channel import Channel
from roundelay.processes.reports import as_raised
from roundelay.processes.wire import decode, encode
from roundelay.reductions import Array, Op, fold, reduction
from roundelay.schedule import Schedule, prove, to_json

END_S = 5.0
LOOK_S = 0.1


class Launch(Protocol):
    """Ranks that somebody started; they come to the socket that they were told, and serve."""

    def runs(self) -> bool:
        """Tell whether they have not all ended."""

    def failure(self, rank: int) -> BaseException:
        """Return why they ended, or this one did, which was not asked to; waits for that."""

    def end(self, *, at_once: bool) -> None:
        """Wait for their end; they have lost the line to this process."""


#: Starts so many ranks, which are told the address of a socket.
Begin = Callable[[int, str], Launch]


class RankPool(ScheduleRunner):
    """Ranks by their number, kept until `close`, or the end of this object or process.

    >>> from roundelay.algorithms import algorithms
    >>> from roundelay.engines import engines
    >>> ring = algorithms.load("all_reduce_ring").schedule(4)
    >>> with engines.load("shared_memory").runner() as runner:
    ...     runner.run(ring, [np.array([r, r]) for r in (1, 2, 3, 4)])[0]
    array([10, 10])
    """

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._kept: dict[int, _KeptRanks] = {}

    def outputs(
        self, schedule: Schedule, brought: Sequence[RankInput], op: Op | None
    ) -> Sequence[Array | None]:
        """Ask the ranks; they are started if there are none, or if the last ones failed."""
        size, by = schedule.size, reduction(op or brought[0].op)
        if size not in self._kept:
            ranks = _PoolRanks(size, self._begin)
            self._kept[size] = _KeptRanks(ranks, weakref.finalize(self, ranks.end))
        ranks = self._kept[size].ranks
        try:
            ranks.ask(schedule, brought, own=op is not None)
            answers = ranks.answers(lambda operands: encode(fold(by, decode(operands))))
        except BaseException as error:
            self._kept.pop(size).end.detach()
            ranks.end(at_once=True)
            if isinstance(error, RankFailed):
                raise as_raised(error) from None
            raise
        return [decode(answer) for answer in answers]

    def close(self) -> None:
        """End the ranks."""
        while self._kept:
            self._kept.popitem()[1].end()


class _PoolRanks:
    """As many ranks, and the lines to them."""

    def __init__(self, size: int, begin: Begin) -> None:
        self._owner, self._size = os.getpid(), size
        self._told: Schedule | None = None  # the schedule that they know
        self._number = 0  # of schedules so far
        self._channels: dict[int, Channel] = {}
        with (
            tempfile.TemporaryDirectory(prefix="roundelay-") as folder,  # of mode 0700
            socket.socket(socket.AF_UNIX) as door,
        ):
            address = str(Path(folder) / "ranks")
            door.bind(address)
            door.listen(size)
            door.settimeout(LOOK_S)
            self._launch = begin(size, address)
            try:
                self._meet(door)
            except BaseException:
                self.end(at_once=True)
                raise

    def _meet(self, door: socket.socket) -> None:
        """Wait until every rank has come; from then on the place of meeting has no name."""
        limit = time.monotonic() + TIMEOUT_S
        while len(self._channels) < self._size:
            missing = next(rank for rank in range(self._size) if rank not in self._channels)
            if not self._launch.runs():
                raise self._launch.failure(missing)
            if time.monotonic() > limit:
                raise RendezvousError(f"rank {missing} did not come within {TIMEOUT_S:g} s.")
            with contextlib.suppress(TimeoutError):
                line, _ = door.accept()
                line.settimeout(None)
                channel = Channel.to_child(line.detach())
                self._channels[int(channel.receive() or b"-1")] = channel

    def ask(self, schedule: Schedule, brought: Sequence[RankInput], *, own: bool) -> None:
        """Tell every rank what it brings, and the schedule if that is another one."""
        text = ""
        if schedule is not self._told:
            prove(schedule)  # or ranks might wait for what nobody sends
            text, self._told, self._number = to_json(schedule), schedule, self._number + 1
        name = f"{schedule.name} #{self._number}"
        for rank, given in enumerate(brought):
            brings = given.array is not None
            array = np.empty(0, given.dtype) if given.array is None else given.array
            request = (name, text, brings, np.ascontiguousarray(array), given.op, own, given.counts)
            self._channels[rank].send(encode(request))

    def answers(self, folded: Callable[[bytes], bytes]) -> list[bytes]:
        """Return one answer of every rank; what they ask to be folded meanwhile is."""
        found: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            while len(found) < self._size:
                for key, _ in selector.select():
                    rank, channel = key.data, self._channels[key.data]
                    message = channel.receive()
                    if message is None:
                        self._hang_up()
                        raise self._launch.failure(rank)
                    if message[:1] == FOLD:
                        channel.send(folded(message[1:]))
                    else:
                        found[rank] = message[1:]
                        selector.unregister(channel)
        return [found[rank] for rank in range(self._size)]

    def end(self, *, at_once: bool = False) -> None:
        """End the ranks; they leave by themselves when nobody asks any more, unless at once."""
        if os.getpid() == self._owner:
            self._hang_up()
            self._launch.end(at_once=at_once)

    def _hang_up(self) -> None:
        for channel in self._channels.values():
            channel.send(b"")  # a fork of this process may hold the other end open
            channel.close()
        self._channels.clear()


class _KeptRanks(NamedTuple):
    ranks: _PoolRanks
    end: weakref.finalize[[], RankPool]


class _StartedRanks:
    """Ranks that an engine starts, on a thread that waits for their end."""

    def __init__(self, engine: type[Engine], size: int, address: str) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(engine, size, address), name="roundelay-ranks", daemon=True
        )
        self._thread.start()

    def _run(self, engine: type[Engine], size: int, address: str) -> None:
        schedules = ToldSchedules()

        def be_rank(rank: Engine) -> bytes:
            serve(rank, schedules, address)
            return b""

        try:
            engine.start(size, be_rank, select=schedules, timeout=TIMEOUT_S)
        except BaseException as error:  # noqa: BLE001 - raised where ranks are asked
            self._error = error

    def runs(self) -> bool:
        return self._thread.is_alive()

    def failure(self, rank: int) -> BaseException:
        self._thread.join(END_S)
        return self._error or RankFailed(rank, ended="ended before it had answered.")

    def end(self, *, at_once: bool) -> None:
        del at_once  # they can't be made to
        self._thread.join(END_S)


def by_start(engine: type[Engine]) -> Begin:
    """Return what begins ranks of an engine by its own `start`."""
    return lambda size, address: _StartedRanks(engine, size, address)
