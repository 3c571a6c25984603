"""`rd.init`: a script finds its ranks, and the others hear how each of them ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from roundelay.launch.environment import rank_environments

Ended = tuple[int, str, str]
Start = Callable[..., list[Ended]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start a script on every rank, as a launcher would; return exit code, output and errors."""

    def start(program: str, size: int, **extra: str) -> list[Ended]:
        base = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), **extra}
        launched = rank_environments(base, size, job="x", port=4711, timeout=20)
        environments = launched if size > 1 else [base]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", "import numpy as np, roundelay as rd\n" + program],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for environment in environments
        ]
        ended = []
        for process in processes:
            stdout, stderr = process.communicate(timeout=60)
            ended.append((process.returncode, stdout, stderr))
        assert list(tmp_path.iterdir()) == []
        return ended

    return start


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_are_in_one_communicator_and_it_is_always_the_same(
    start: Start, size: int
) -> None:
    program = """
comm = rd.init()
same = rd.init(engine="shared_memory") is comm
print(comm.rank, comm.size, same, comm.timeout, comm.all_reduce(np.ones(1))[0])
"""
    timeout = 20.0 if size > 1 else 60.0
    for rank, ended in enumerate(start(program, size)):
        assert ended == (0, f"{rank} {size} True {timeout} {float(size)}\n", "")


def test_a_rank_of_another_mpi_does_not_run_alone() -> None:
    pytest.importorskip("mpi4py")
    other = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", "import roundelay as rd; rd.init()"],
        env={**os.environ, **other},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "InvalidArgumentError: OMPI_COMM_WORLD_SIZE=2 says" in ended.stderr


def test_the_argument_wins_over_the_variable(start: Start) -> None:
    for ended in start("print(rd.init(timeout=7).timeout)", 2):
        assert ended[:2] == (0, "7.0\n")


def test_an_uncaught_exception_is_told_to_the_others_at_once(start: Start) -> None:
    program = """
import sys
shown = sys.excepthook
comm = rd.init()
if comm.rank == 1:
    raise ValueError("no such layer")
comm.barrier()
"""
    zero, one, two = start(program, 3)
    assert one[0] == 1
    assert one[2].splitlines()[-1] == "ValueError: no such layer"
    for code, _, stderr in (zero, two):
        assert code == 1
        assert "PeerLost: Rank 1 failed: ValueError: no such layer" in stderr


def test_a_hook_that_was_there_before_is_still_called(start: Start) -> None:
    program = """
import sys
sys.excepthook = lambda kind, error, trace: print("mine:", error)
rd.init()
raise ValueError("x")
"""
    for code, stdout, _ in start(program, 2):
        assert (code, stdout) == (1, "mine: x\n")


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_says_goodbye_is_missed_by_name(start: Start, late: int) -> None:
    program = f"""
import time
comm = rd.init()
time.sleep(0.5 * (comm.rank == {late}))
if comm.rank == 0:
    comm.barrier()
"""
    zero, one = start(program, 2)
    assert zero[0] == one[0] == 1
    assert "PeerLost: Rank 1 has finished, but rank 0 still needs it:" in zero[2]
    assert "CollectiveMismatch: The ranks made different calls:" in one[2]
    for told in (zero[2], one[2]):
        assert "rank 0: barrier #1 (" in told
        assert "rank 1: came to the end of its script" in told


def test_an_early_exit_keeps_its_code(start: Start) -> None:
    program = """
import sys
comm = rd.init()
if comm.rank == 1:
    sys.exit(3)
comm.barrier()
"""
    zero, one = start(program, 2)
    assert (zero[0], one[0]) == (1, 3)
    assert "PeerLost: Rank 1 has finished, but rank 0 still needs it:" in zero[2]


def test_last_calls_that_differ_are_told_at_the_end_of_the_script(start: Start) -> None:
    program = """
import atexit
atexit.register(print, "the rest of the end")
comm = rd.init()
comm.broadcast(bytearray(3), comm.rank)
print("done")
"""
    for code, stdout, stderr in start(program, 3):
        assert (code, stdout) == (1, "done\nthe rest of the end\n")
        assert "CollectiveMismatch: The ranks made different calls:" in stderr
        for rank in range(3):
            assert f"rank {rank}: broadcast #1 uint8[3] root={rank} (direct) at <string>" in stderr


def test_a_script_that_ends_well_ends_with_0(start: Start) -> None:
    program = """
import time
comm = rd.init()
sub = comm.split(comm.rank % 2)
comm.broadcast(bytearray(3), 1)
sub.broadcast(bytearray(3))
time.sleep(0.2 * comm.rank)
"""
    assert start(program, 3) == [(0, "", "")] * 3


def test_a_fork_is_no_rank(start: Start) -> None:
    program = """
import os
comm = rd.init()
if os.fork() == 0:
    try:
        rd.init()
    except rd.RoundelayError as error:
        print(error, flush=True)
    raise ValueError("of a child is no business of the ranks")
os.wait()
comm.barrier()
"""
    for rank, (code, stdout, stderr) in enumerate(start(program, 2)):
        assert code == 0
        assert f"is a fork of rank {rank}" in stdout
        assert "no business" in stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("rd.init('threads')", "for threads see rd.run"),
        ("rd.init('shard_memory')", "Did you mean 'shared_memory'"),
        ("rd.init(timeout=-1)", "timeout is a positive number of seconds, not -1"),
    ],
)
def test_wrong_use_is_named(start: Start, call: str, message: str) -> None:
    for code, _, stderr in start(call, 1):
        assert code == 1
        assert message in stderr.splitlines()[-1]


def test_another_launcher_is_pointed_out(start: Start) -> None:
    ((code, stdout, stderr),) = start("print(rd.init().size)", 1, SLURM_PROCID="3")
    assert (code, stdout) == (0, "1\n")
    assert "SLURM_PROCID=3" in stderr
    assert "<string>:2" in stderr  # where the user called it
