"""`roundelay run`: one process per rank, their output, and an end that leaves none behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from roundelay.launch._output import screens
from roundelay.launch._rank_process import RankProcess
from roundelay.launch.ending import Ending, RankEnd
from roundelay.launch.spared import SpareLine
from roundelay.processes.limits import telling_limits
from roundelay.signals import signals_to_wait_on

__all__ = ["SHUTDOWN_S", "run_job"]

FAILED_GRACE_S = 3.0  # for ranks to hear that another one failed, and to end by themselves
ASKED_GRACE_S = 5.0  # for ranks to end when they are asked to because another one failed
SHUTDOWN_S = 10.0  # for ranks to end when the job is asked to
DRAIN_S = 1.0  # for output that is still on its way when all ranks have ended
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_job(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    shutdown_timeout: float = SHUTDOWN_S,
) -> Ending:
    """Run the command once for every environment, and return how it ended.

    Standard input goes to rank 0. When a rank fails, the others get some seconds to notice, unless
    it had said that the job goes on without it. A signal to end goes to all ranks, and those that
    have not ended after `shutdown_timeout` seconds are killed. Whatever happens, no rank outlives
    this process.
    """
    with _Job(len(environments), shutdown_timeout) as job:
        try:
            with telling_limits(f"a job of {len(environments)} ranks"):
                for rank, environment in enumerate(environments):
                    job.start(rank, command, environment)
            while job.running:
                job.wait()
        except BrokenPipeError:  # whoever read our output has left
            job.reader_left()
    return job.ending()


class _Job:
    """The ranks under way, and what is to be done about them, and when."""

    def __init__(self, size: int, shutdown_timeout: float) -> None:
        self._shutdown_timeout = shutdown_timeout
        self._screens = screens(sys.stdout.buffer, sys.stderr.buffer, size=size)
        self._ranks: list[RankProcess] = []
        self._ends: list[RankEnd] = []  # in the order of time
        self._signals: deque[int] = deque()  # that came and were not yet acted upon
        self._signal: int | None = None  # the one that ends the job
        self._plan: deque[tuple[float, signal.Signals]] = deque()  # when to tell the ranks what
        self._selector = selectors.DefaultSelector()
        self._cleanup = contextlib.ExitStack()
        self._spared = SpareLine()  # who may be lost

    def __enter__(self) -> _Job:  # noqa: PYI034 - private
        caught = signals_to_wait_on(ENDING_SIGNALS, self._signals.append)
        wakeup = self._cleanup.enter_context(caught)
        self._selector.register(wakeup, selectors.EVENT_READ, lambda: os.read(wakeup, 4096))
        self._selector.register(self._spared.read, selectors.EVENT_READ, self._spared.listen)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nobody behind: also what ranks have started, in the group of each."""
        for rank in self._ranks:
            rank.kill_group()
        with contextlib.suppress(BrokenPipeError):
            self._drain()
        for rank in self._ranks:
            self._note_end(rank)
            rank.close(self._selector)
        self._selector.close()
        self._spared.close()
        self._cleanup.close()

    @property
    def running(self) -> bool:
        """Tell whether any rank has not ended."""
        return len(self._ends) < len(self._ranks)

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start one rank."""
        environment = self._spared.environment(environment)
        self._ranks.append(
            RankProcess(rank, command, environment, self._screens, self._selector, self._spared.fd)
        )

    def wait(self) -> None:
        """Let something happen: output, an end, a signal, or a time that has come."""
        self._select(None)
        for rank in self._ranks:
            if rank.has_ended:
                self._note_end(rank)
        self._act_on_signals()
        while self._plan and self._plan[0][0] <= time.monotonic():
            self._tell(self._plan.popleft()[1])

    def reader_left(self) -> None:
        """Note that nobody reads on: the job ends as a command in a pipe does."""
        self._signal = signal.SIGPIPE
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.flush()
                continue
            os.dup2(null, stream.fileno())  # or Python complains about it at its exit
        os.close(null)

    def ending(self) -> Ending:
        """Return how all ranks ended."""
        return Ending(self._ends, self._signal, self._spared.blamed)

    def _select(self, most: float | None) -> bool:
        """Wait for what comes next, and show what has waited; tell whether anything came."""
        due = [rank.due() for rank in self._ranks] + [at for at, _ in self._plan]
        times = [each - time.monotonic() for each in due if each is not None]
        limit = min([*times, *([] if most is None else [most])], default=None)
        ready = self._selector.select(None if limit is None else max(0.0, limit))
        for key, _ in ready:
            key.data()
        for rank in self._ranks:
            rank.show(time.monotonic())
        for screen in self._screens:
            screen.flush()
        return bool(ready)

    def _drain(self) -> None:
        end = time.monotonic() + DRAIN_S
        while any(rank.has_output for rank in self._ranks) and time.monotonic() < end:
            self._select(end - time.monotonic())
        for rank in self._ranks:
            rank.finish_output()
        for screen in self._screens:
            screen.flush()

    def _note_end(self, rank: RankProcess) -> None:
        if any(end.rank == rank.rank for end in self._ends):
            return
        loss = self._spared.loss_of(rank.rank)
        end = replace(rank.end(), passes=loss == "passes")
        self._ends.append(end)
        if end.code and loss == "ends" and not self._plan and self._signal is None:
            now = time.monotonic()
            self._plan.append((now + FAILED_GRACE_S, signal.SIGTERM))
            self._plan.append((now + FAILED_GRACE_S + ASKED_GRACE_S, signal.SIGKILL))

    def _act_on_signals(self) -> None:
        while self._signals:
            number = self._signals.popleft()
            self._plan.clear()
            if self._signal is not None:
                self._tell(signal.SIGKILL)
                continue
            self._signal = number
            self._tell(signal.Signals(number))
            now, seconds = time.monotonic(), self._shutdown_timeout
            if number != signal.SIGTERM:  # a handler that saves its work should be called once
                self._plan.append((now + seconds / 2, signal.SIGTERM))
            self._plan.append((now + seconds, signal.SIGKILL))

    def _tell(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            rank.tell(number)
