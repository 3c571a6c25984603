"""Runners of schedules keep their ranks, replace those that die, and leave nobody behind."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.algorithms import algorithms
from roundelay.engines import engines, run_schedule
from roundelay.engines.mpi.mpirun import find_mpirun
from roundelay.errors import InvalidArgumentError, ProofError, RankFailed, UnknownNameError
from roundelay.schedule import Schedule

FORKED = ("shared_memory", "gloo")
try:
    find_mpirun()
    STARTED: tuple[str, ...] = ("threads", *FORKED, "mpi")
except InvalidArgumentError:
    STARTED = ("threads", *FORKED)


def wait_until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def children_of(task: Path) -> list[str]:
    """Return the processes that a thread has started; none if it has just ended."""
    try:
        return (task / "children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def children() -> set[int]:
    """Return the processes below this one."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in children_of(task)}


def processes(size: int, before: set[int]) -> list[int]:
    """Return the ranks below this process, beside those of other pools, once there are so many."""
    wait_until(lambda: len(children() - before) == size)
    return sorted(children() - before)


@pytest.mark.parametrize("engine", FORKED)
def test_a_runner_keeps_its_ranks_and_ends_them_with_itself(engine: str) -> None:
    ring, two_shot = (
        algorithms.load(f"all_reduce_{name}").schedule(3) for name in ("ring", "two_shot")
    )
    inputs = [np.ones(2)] * 3
    before = children()
    runner = engines.load(engine).runner()
    runner.run(ring, inputs)
    pids = processes(3, before)
    for schedule in (ring, two_shot, ring):
        np.testing.assert_array_equal(runner.run(schedule, inputs)[0], [3, 3])
    assert processes(3, before) == pids
    del runner
    gc.collect()
    wait_until(lambda: all(map(gone, pids)))


@pytest.mark.parametrize("engine", FORKED)
def test_a_rank_of_a_runner_that_dies_is_named_and_replaced(engine: str) -> None:
    schedule = algorithms.load("all_reduce_ring").schedule(3)
    inputs = [np.ones(2)] * 3
    before = children()
    with engines.load(engine).runner() as runner:
        runner.run(schedule, inputs)
        os.kill(processes(3, before)[1], signal.SIGKILL)
        with pytest.raises(RankFailed, match=r"rank \d .*SIGKILL"):
            runner.run(schedule, inputs)
        np.testing.assert_array_equal(runner.run(schedule, inputs)[0], [3, 3])


@pytest.mark.parametrize("engine", STARTED)
def test_a_reduction_of_your_own_runs_in_the_program_and_its_error_is_raised_as_it_is(
    engine: str,
) -> None:
    seen = []

    def multiply(left: Any, right: Any) -> Any:
        seen.append(os.getpid())
        return left * right

    schedule = algorithms.load("all_reduce_ring").schedule(2)
    inputs = [np.array([1.0, 2.0]), np.array([10.0, 20.0])]
    with engines.load(engine).runner() as runner:
        for _ in range(2):
            product = runner.run(schedule, inputs, op=rd.Op(multiply))[0]
            np.testing.assert_array_equal(product, [10, 40])
            with pytest.raises(ZeroDivisionError):
                runner.run(schedule, inputs, op=rd.Op(lambda left, _: left * (1 // 0)))
    assert set(seen) == {os.getpid()}


@pytest.mark.parametrize("engine", STARTED)
def test_a_schedule_that_does_not_keep_its_contract_is_refused(engine: str) -> None:
    ring = algorithms.load("all_reduce_ring").schedule(2)
    broken = Schedule(ring.collective, 2, ring.transfers[:-1], parts=ring.parts)
    with engines.load(engine).runner() as runner, pytest.raises(ProofError):
        runner.run(broken, [np.ones(2)] * 2)


@pytest.mark.parametrize(
    ("engine", "error", "message"),
    [
        ("hierarchical", InvalidArgumentError, "hierarchical starts no ranks"),
        ("thread", UnknownNameError, "Did you mean 'threads'"),
    ],
)
def test_engines_that_start_no_ranks_say_so(
    engine: str, error: type[Exception], message: str
) -> None:
    ring = algorithms.load("all_reduce_ring").schedule(2)
    with pytest.raises(error, match=message):
        run_schedule(ring, [np.ones(2)] * 2, engine)
