"""Ranks as threads of this process: the quickest to start, for notebooks and tests."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from roundelay import _core
from roundelay.engines._base import Engine
from roundelay.engines._native.engine import NativeEngine
from roundelay.engines._selector import Select
from roundelay.errors import RankFailed, ranks_text
from roundelay.processes.death import is_consequence, passes, step_of
from roundelay.processes.limits import telling_limits
from roundelay.processes.world import make_world

__all__ = ["Threads"]

Result = TypeVar("Result")
SOON_S = 1.0  # for ranks to end by themselves after Ctrl-C
LOOK_S = 0.2  # between two looks for signals
TINY_S = 5e-5  # between two looks at a thread that ends


class Threads(NativeEngine):
    """A rank that is a thread of this process, and shares its memory.

    >>> import numpy as np
    >>> from roundelay.algorithms import algorithms
    >>> from roundelay.engines import run_schedule
    >>> ring = algorithms.load("all_reduce_ring").schedule(4)
    >>> run_schedule(ring, [np.array([r, r]) for r in (1, 2, 3, 4)], "threads")[0]
    array([10, 10])
    """

    in_processes = False

    @classmethod
    def start(
        cls, size: int, body: Callable[[Engine], Any], *, select: Select, timeout: float
    ) -> list[Any]:
        """Run the ranks; the first error is raised as it was, with the rank in a note."""
        selector = select(size)
        return _run_all(
            make_world(size), lambda world, rank: body(cls(world, rank, selector, timeout=timeout))
        )


class _RankThread(threading.Thread, Generic[Result]):
    """One rank: what it gives is in `result`; how it fails is told to all and kept in order."""

    result: Result = None  # type: ignore[assignment] # of a rank that was lost

    def __init__(
        self,
        world: _core.World,
        rank: int,
        body: Callable[[_core.World, int], Result],
        failures: list[tuple[bool, int, BaseException]],
    ) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self._world, self._rank, self._body, self._failures = world, rank, body, failures
        self._ended = threading.Event()

    def run(self) -> None:
        world, rank = self._world, self._rank
        try:
            self.result = self._body(world, rank)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            self._failures.append((is_consequence(world, rank, error), rank, error))
            world.fail("failed", rank, f"{type(error).__name__}: {error}")
        finally:
            world.leave(rank)
            self._ended.set()

    def wait(self) -> None:
        """Wait until the rank has ended, if it ever began."""
        if self.ident is not None:
            # Join alone, interrupted once, forgets to wait. And a signal that comes just before a
            # wait begins does not interrupt it: it is heard at the next look.
            while not self._ended.wait(LOOK_S):
                pass
            self.join()
            self._see_off(time.monotonic() + SOON_S)

    def _see_off(self, until: float) -> None:
        """Wait until the kernel's thread has ended, too: what it lets go of last may need Python.

        Torch does so with what a backward pass that raised has left; a process that ends meanwhile
        would be aborted.
        """
        place = f"/proc/self/task/{self.native_id}"
        while os.path.exists(place) and time.monotonic() < until:  # noqa: PTH110 - a quick look
            time.sleep(TINY_S)

    def runs(self, until: float) -> bool:
        """Tell whether the rank has still not ended by then."""
        left = max(0.0, until - time.monotonic())
        return self.ident is not None and not self._ended.wait(left)


def _tell_who_runs(threads: Sequence[_RankThread[Any]]) -> None:
    """Say for whom Ctrl-C waits: nobody can end a thread that does not communicate."""
    until = time.monotonic() + SOON_S
    ranks = [rank for rank, thread in enumerate(threads) if thread.runs(until)]
    if ranks:
        sys.stderr.write(
            f"roundelay: interrupted, and waiting for {ranks_text(ranks)} to come back from your "
            f"code, since a thread can't be ended. Ctrl-C once more leaves at once.\n"
        )


def _run_all(world: _core.World, body: Callable[[_core.World, int], Result]) -> list[Result]:
    failures: list[tuple[bool, int, BaseException]] = []  # a consequence?, in the order of time
    threads = [_RankThread(world, rank, body, failures) for rank in range(world.size)]
    for rank in range(world.size):  # nobody may find another one absent
        world.enter(rank)
    try:
        with telling_limits(f"a job of {world.size} ranks"):
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.wait()
    except BaseException as error:
        # Ctrl-C, or no more threads to be had: whoever waits for another rank is woken.
        kind = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        world.fail(kind, 0, f"{type(error).__name__}: {error}")
        if kind == "interrupted":
            _tell_who_runs(threads)
        for thread in threads:
            thread.wait()
        raise
    failures[:] = [failure for failure in failures if not passes(world, failure[1])]
    if failures:
        _, rank, first = min(failures, key=lambda failure: failure[0])
        step = step_of(world, rank)
        within = "" if step is None else f", in step {step}"
        first.add_note(f"Raised on rank {rank} of {world.size}{within}.")
        try:
            if isinstance(first, SystemExit):  # by which our caller would end, and as a success
                raise RankFailed(rank, "SystemExit", str(first), step=step) from first
            raise first
        finally:  # or the error would hold this frame, and this frame the error
            failures.clear()
            del first
    return [thread.result for thread in threads]
