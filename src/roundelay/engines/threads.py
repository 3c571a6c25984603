"""Ranks as threads of this process: the quickest to start, for notebooks and tests."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from roundelay import _core
from roundelay.engines._base import Engine, Select
from roundelay.engines._harness import Harness, Part
from roundelay.engines._native.engine import NativeEngine
from roundelay.engines._native.parts import call_native, fold_in_python, make_group
from roundelay.errors import RankFailed, ranks_text
from roundelay.processes.death import is_consequence, passes, step_of
from roundelay.processes.limits import telling_limits
from roundelay.processes.world import make_world
from roundelay.reductions import Array, Op
from roundelay.schedule import Programs, Schedule, compile_schedule

__all__ = ["Threads"]

Result = TypeVar("Result")
SOON_S = 1.0  # for ranks to end by themselves after Ctrl-C


class Threads(Harness):
    """Runs a schedule on the native core, one thread per rank.

    >>> import numpy as np
    >>> from roundelay.algorithms import algorithms
    >>> ring = algorithms.load("all_reduce_ring").schedule(4)
    >>> Threads().run(ring, [np.array([r, r]) for r in (1, 2, 3, 4)])[0]
    array([10, 10])
    """

    in_processes = False

    def __init__(self) -> None:
        self._groups: dict[int, tuple[_core.World, list[_core.Group]]] = {}  # by size
        self._programs: Programs | None = None  # of the latest schedule

    @classmethod
    def start(
        cls, size: int, body: Callable[[Engine], Any], *, select: Select, timeout: float
    ) -> list[Any]:
        """Run the ranks; the first error is raised as it was, with the rank in a note."""
        selection = select(size)
        return _run_all(
            make_world(size),
            lambda world, rank: body(NativeEngine(world, rank, selection, timeout=timeout)),
        )

    def outputs(
        self, schedule: Schedule, parts: Sequence[Part], op: Op | None
    ) -> Sequence[Array | None]:
        """Run a thread for each part."""
        if self._programs is None or self._programs.schedule is not schedule:
            self._programs = compile_schedule(schedule)
        programs, size = self._programs, schedule.size
        # A world that has seen trouble is of no more use, so it is kept only after a good run.
        world, groups = self._groups.pop(size) if size in self._groups else _make_groups(size)

        def body(world: _core.World, rank: int) -> Array | None:
            if op is None:
                return call_native(groups[rank], programs, rank, parts[rank])
            return fold_in_python(world, groups[rank], schedule, rank, parts[rank], op.reduction)

        outputs = _run_all(world, body)
        self._groups[size] = world, groups
        return outputs

    def close(self) -> None:
        """Let go of the memory that is kept for the next run."""
        self._groups.clear()


def _make_groups(size: int) -> tuple[_core.World, list[_core.Group]]:
    world = make_world(size)
    return world, [make_group(world, rank) for rank in range(size)]


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
            self._ended.wait()  # join alone, interrupted once, forgets to wait
            self.join()

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
    failures[:] = [one for one in failures if not passes(world, one[1])]
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
