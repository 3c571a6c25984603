"""Ranks that mpirun started for the engine: they live on, end with it, and are missed when dead."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundelay.algorithms import algorithms
from roundelay.engines._rank_pool import RankPool
from roundelay.engines.mpi._ranks import MpirunRanks
from roundelay.engines.mpi.mpirun import find_mpirun
from roundelay.errors import InvalidArgumentError, RankFailed
from roundelay.schedule import Schedule

try:
    find_mpirun()
except InvalidArgumentError as error:
    pytest.skip(str(error), allow_module_level=True)

ring = algorithms.load("all_reduce_ring").schedule(2)
INPUTS = [np.array([1.0, 2.0]), np.array([10.0, 20.0])]


@pytest.fixture
def runner() -> Iterator[RankPool]:
    with RankPool(MpirunRanks) as pool:
        yield pool


def process(runner: RankPool) -> Any:
    launch: Any = runner._kept[2].ranks._launch
    return launch._process


def summed(runner: RankPool, schedule: Schedule) -> Any:
    outputs: list[Any] = runner.run(schedule, INPUTS)
    return outputs[1].tolist()


def children(pid: int) -> list[int]:
    """Return the processes below one, however deep."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        if parent == pid:
            child = int(path.parent.name)
            found += [child, *children(child)]
    return found


def gone(pids: list[int]) -> bool:
    limit = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def test_ranks_live_on_between_runs_and_end_with_the_engine(runner: RankPool) -> None:
    before = set(Path(tempfile.gettempdir()).glob("roundelay-*"))
    assert summed(runner, ring) == [11, 22]
    first = process(runner)
    two_shot = algorithms.load("all_reduce_two_shot").schedule(2)
    for schedule in (two_shot, ring, ring):
        assert summed(runner, schedule) == [11, 22]
    assert process(runner) is first
    assert set(Path(tempfile.gettempdir()).glob("roundelay-*")) <= before
    ranks = [first.pid, *children(first.pid)]
    assert len(ranks) >= 3
    runner.close()
    assert gone(ranks)
    assert first.returncode == 0
    assert summed(runner, ring) == [11, 22]


def test_ranks_end_with_the_object() -> None:
    runner = RankPool(MpirunRanks)
    runner.run(ring, INPUTS)
    ranks = [process(runner).pid, *children(process(runner).pid)]
    del runner
    gc.collect()
    assert gone(ranks)


def test_a_dead_rank_is_told_and_the_next_run_starts_anew(runner: RankPool) -> None:
    runner.run(ring, INPUTS)
    pids = children(process(runner).pid)
    python = [p for p in pids if "mpi._rank" in Path(f"/proc/{p}/cmdline").read_text()]
    os.kill(python[-1], signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"rank \d+ ended before it had answered"):
        runner.run(ring, INPUTS)
    assert gone(pids)
    assert summed(runner, ring) == [11, 22]


def test_ranks_end_with_a_program_that_is_killed() -> None:
    program = (
        "import numpy as np, os, signal\n"
        "from roundelay.algorithms import algorithms\n"
        "from roundelay.engines.mpi import Mpi\n"
        "runner = Mpi.runner()\n"
        "runner.run(algorithms.load('all_reduce_ring').schedule(2), [np.ones(1)] * 2)\n"
        "print(runner._kept[2].ranks._launch._process.pid, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        launcher = int(killed.stdout.readline())
        ranks = [launcher, *children(launcher)]
        killed.kill()
    assert gone(ranks)
