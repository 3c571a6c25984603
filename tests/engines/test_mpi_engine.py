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
from roundelay.engines.mpi import Mpi
from roundelay.engines.mpi.mpirun import find_mpirun
from roundelay.errors import InvalidArgumentError, ProofError, RankFailed
from roundelay.reductions import Op
from roundelay.schedule import Schedule

try:
    find_mpirun()
except InvalidArgumentError as error:
    pytest.skip(str(error), allow_module_level=True)

ring = algorithms.load("all_reduce_ring").schedule(2)
INPUTS = [np.array([1.0, 2.0]), np.array([10.0, 20.0])]


@pytest.fixture
def engine() -> Iterator[Mpi]:
    with Mpi() as made:
        yield made


def process(engine: Mpi) -> Any:
    return engine._ranks[2]._process


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


def test_ranks_live_on_between_runs_and_end_with_the_engine(engine: Mpi) -> None:
    before = set(Path(tempfile.gettempdir()).glob("roundelay-*"))
    assert engine.run(ring, INPUTS)[1].tolist() == [11, 22]  # type: ignore[union-attr]
    first = process(engine)
    two_shot = algorithms.load("all_reduce_two_shot").schedule(2)
    for schedule in (two_shot, ring, ring):
        assert engine.run(schedule, INPUTS)[0].tolist() == [11, 22]  # type: ignore[union-attr]
    assert process(engine) is first
    assert set(Path(tempfile.gettempdir()).glob("roundelay-*")) <= before
    ranks = [first.pid, *children(first.pid)]
    assert len(ranks) >= 3
    engine.close()
    assert gone(ranks)
    assert first.returncode == 0
    assert engine.run(ring, INPUTS)[0].tolist() == [11, 22]  # type: ignore[union-attr]


def test_ranks_end_with_the_object() -> None:
    engine = Mpi()
    engine.run(ring, INPUTS)
    ranks = [process(engine).pid, *children(process(engine).pid)]
    del engine
    gc.collect()
    assert gone(ranks)


def test_a_dead_rank_is_told_and_the_next_run_starts_anew(engine: Mpi) -> None:
    engine.run(ring, INPUTS)
    pids = children(process(engine).pid)
    python = [p for p in pids if "mpi._rank" in Path(f"/proc/{p}/cmdline").read_text()]
    os.kill(python[-1], signal.SIGKILL)
    with pytest.raises(RankFailed, match="ended with no Python error"):
        engine.run(ring, INPUTS)
    assert gone(pids)
    assert engine.run(ring, INPUTS)[0].tolist() == [11, 22]  # type: ignore[union-attr]


def test_ranks_end_with_a_program_that_is_killed() -> None:
    program = (
        "import numpy as np, os, signal\n"
        "from roundelay.algorithms import algorithms\n"
        "from roundelay.engines.mpi import Mpi\n"
        "engine = Mpi()\n"
        "engine.run(algorithms.load('all_reduce_ring').schedule(2), [np.ones(1)] * 2)\n"
        "print(engine._ranks[2]._process.pid, flush=True)\n"
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


def test_a_function_of_your_own_runs_here_and_its_error_is_raised_as_it_is(engine: Mpi) -> None:
    seen = []

    def fold(left: Any, right: Any) -> Any:
        seen.append(os.getpid())
        return left * right

    assert engine.run(ring, INPUTS, op=Op(fold))[0].tolist() == [10, 40]  # type: ignore[union-attr]
    assert set(seen) == {os.getpid()}
    with pytest.raises(ZeroDivisionError):
        engine.run(ring, INPUTS, op=Op(lambda left, _: left * (1 // 0)))
    assert engine.run(ring, INPUTS)[0].tolist() == [11, 22]  # type: ignore[union-attr]


def test_a_schedule_that_does_not_keep_its_contract_is_refused(engine: Mpi) -> None:
    broken = Schedule(ring.collective, 2, ring.transfers[:-1], parts=ring.parts)
    with pytest.raises(ProofError):
        engine.run(broken, INPUTS)
    assert engine.run(ring, INPUTS)[0].tolist() == [11, 22]  # type: ignore[union-attr]
