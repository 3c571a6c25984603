"""`rd.run`: results in rank order, the first error by name, and nobody left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.errors import (
    InvalidArgumentError,
    PeerLost,
    RankFailed,
    UnknownNameError,
    UnsendableError,
)

ENGINES = ("threads", "shared_memory")
SIZES = (1, 2, 3, 4, 7)

pytestmark = pytest.mark.usefixtures("no_children")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_runs_the_function_and_results_are_in_order(engine: str, size: int) -> None:
    offset = 100

    def work(comm: Any, factor: int) -> tuple[int, int, list[float]]:
        total = comm.all_reduce(np.full(3, float(comm.rank)))
        return comm.rank * factor + offset, comm.size, total.tolist()

    total = float(sum(range(size)))
    assert rd.run(work, ranks=size, engine=engine, args=(10,)) == [
        (rank * 10 + offset, size, [total] * 3) for rank in range(size)
    ]


def test_the_default_is_four_processes() -> None:
    pids = rd.run(lambda _: os.getpid())
    assert len({*pids, os.getpid()}) == 5


def test_threads_are_of_this_process() -> None:
    assert rd.run(lambda _: os.getpid(), ranks=3, engine="threads") == [os.getpid()] * 3


class Custom(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_the_error_of_the_first_failing_rank_is_raised(engine: str, size: int, when: str) -> None:
    """Wherever the others are, whichever rank it is."""
    for culprit in range(size):

        def work(comm: Any, culprit: int = culprit) -> None:
            for turn in ("before", "between", "after"):
                if comm.rank == culprit and turn == when:
                    raise Custom(f"broke {when}")
                if turn != "after":
                    comm.barrier()

        with pytest.raises(Custom if engine == "threads" else RankFailed) as caught:
            rd.run(work, ranks=size, engine=engine)
        if engine == "threads":
            assert str(caught.value) == f"broke {when}"
            assert caught.value.__notes__ == [f"Raised on rank {culprit} of {size}."]
        else:
            error = caught.value
            assert isinstance(error, RankFailed)
            assert str(error) == f"rank {culprit} raised Custom: broke {when}"
            assert (error.rank, error.kind, error.message) == (culprit, "Custom", f"broke {when}")
            lines = error.traceback.splitlines()
            assert __file__ in lines[1]  # begins where the user's code does
            assert lines[-1].endswith(f"Custom: broke {when}")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_others_hear_why(engine: str, tmp_path: Any) -> None:
    def work(comm: Any) -> None:
        if comm.rank == 1:
            raise Custom("of all things")
        try:
            comm.barrier()
        except PeerLost as error:
            (tmp_path / str(comm.rank)).write_text(str(error))
            raise

    with pytest.raises((Custom, RankFailed), match="of all things"):
        rd.run(work, ranks=3, engine=engine)
    for rank in (0, 2):
        assert (tmp_path / str(rank)).read_text() == "Rank 1 failed: Custom: of all things"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "killed by SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "killed by SIGTERM"),
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os._exit(0), "exit code 0"),
        (lambda: sys.exit(5), "SystemExit: 5"),
    ],
    ids=["kill", "segv", "term", "_exit3", "_exit0", "exit"],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_process_that_ends_without_a_result_is_named(
    end: Callable[[], None], said: str, size: int
) -> None:
    culprit = size - 1

    def work(comm: Any) -> None:
        comm.barrier()
        if comm.rank == culprit:
            end()
        comm.barrier()

    began = time.monotonic()
    with pytest.raises(RankFailed, match=f"rank {culprit} .*{said}"):
        rd.run(work, ranks=size)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("way", ["raises", "exits", "returns"])
@pytest.mark.parametrize("size", [2, 3])
def test_what_a_rank_has_forked_speaks_for_nobody(way: str, size: int) -> None:
    """Its end is not the rank's, its error is nobody's failure, and what it returns no result."""

    def work(comm: Any) -> str:
        if comm.rank == size - 1 and (child := os.fork()) == 0:
            if way == "raises":
                raise ValueError(way)
            if way == "exits":
                sys.exit(3)
            return "the child's"
        if comm.rank == size - 1:
            os.waitpid(child, 0)
        return f"{comm.all_reduce(np.ones(1))[0]}"

    assert rd.run(work, ranks=size) == [f"{size}.0"] * size


def test_a_rank_that_computes_on_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundelay.processes.reports.GRACE_S", 0.2)

    def work(comm: Any) -> None:
        if comm.rank == 0:
            raise Custom("stop")
        time.sleep(600)

    began = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 raised Custom: stop"):
        rd.run(work, ranks=3)
    assert time.monotonic() - began < 30


def test_a_rank_that_ignores_everything_but_kill_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("roundelay.processes.reports.GRACE_S", 0.2)
    monkeypatch.setattr("roundelay.processes.children.GRACE_S", 0.2)

    def work(comm: Any) -> None:
        if comm.rank == 0:
            raise Custom("stop")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)

    with pytest.raises(RankFailed, match="rank 0 raised Custom: stop"):
        rd.run(work, ranks=2)


def test_results_that_can_not_travel_are_refused_by_rank() -> None:
    with pytest.raises(UnsendableError, match=r"the result of rank [01] is a builtins.set.*pickle"):
        rd.run(lambda _: {1}, ranks=2)
    assert rd.run(lambda comm: {comm.rank}, ranks=2, allow_pickle=True) == [{0}, {1}]
    found = rd.run(lambda _: {1}, ranks=2, engine="threads")
    assert found == [{1}, {1}]


def test_large_results_come_whole() -> None:
    found = rd.run(lambda comm: np.full(3_000_000, comm.rank), ranks=3)
    for rank, array in enumerate(found):
        assert array.shape == (3_000_000,)
        assert (array == rank).all()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"fn": 3}, InvalidArgumentError, "needs a function of a communicator, not 3"),
        ({"ranks": 0}, InvalidArgumentError, "whole number from 1 to 1024, not 0"),
        ({"ranks": -1}, InvalidArgumentError, "not -1"),
        ({"ranks": 2.0}, InvalidArgumentError, "not 2.0"),
        ({"ranks": True}, InvalidArgumentError, "not True"),
        ({"ranks": 5000}, InvalidArgumentError, "not 5000"),
        ({"engine": "thread"}, UnknownNameError, "Did you mean 'threads'"),
        ({"engine": "reference"}, InvalidArgumentError, "starts no ranks"),
        ({"timeout": 0}, InvalidArgumentError, "positive number of seconds, not 0"),
        ({"timeout": -1.0}, InvalidArgumentError, "not -1.0"),
        ({"timeout": float("nan")}, InvalidArgumentError, "not nan"),
        ({"timeout": "5"}, InvalidArgumentError, "not '5'"),
    ],
)
def test_wrong_use_is_named(options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        rd.run(**{"fn": lambda _: None, **options})


@pytest.mark.parametrize("engine", ENGINES)
def test_the_timeout_reaches_the_calls(engine: str) -> None:
    assert rd.run(lambda comm: comm.timeout, ranks=2, engine=engine, timeout=7) == [7.0, 7.0]


@pytest.mark.parametrize("engine", ENGINES)
def test_runs_may_be_nested(engine: str) -> None:
    def outer(comm: Any) -> list[int]:
        return rd.run(lambda inner: 10 * comm.rank + inner.rank, ranks=2, engine=engine)

    assert rd.run(outer, ranks=2, engine=engine) == [[0, 1], [10, 11]]


@pytest.mark.parametrize("engine", ENGINES)
def test_many_runs_leak_nothing(engine: str) -> None:
    def state() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    rd.run(lambda comm: comm.rank, ranks=2, engine=engine)
    before = state()
    for turn in range(30):
        if turn % 3:
            rd.run(lambda comm: comm.barrier(), ranks=2, engine=engine)
        else:
            with pytest.raises((Custom, RankFailed)) as caught:
                rd.run(_fail, ranks=2, engine=engine)
            del caught  # its traceback holds the communicator
    assert state() == before


def _fail(comm: Any) -> None:
    if comm.rank == 1:
        raise Custom
    comm.barrier()


PROGRAM = """
import os, sys, time
import roundelay as rd

def work(comm):
    print(f"pid {{os.getpid()}}\\n", end="", flush=True)
    comm.barrier()
    if {waiting!r} == "call":
        if comm.rank:
            comm.barrier()
    time.sleep(600)

rd.run(work, ranks=3, engine={engine!r})
"""


def started(engine: str, waiting: str) -> tuple[subprocess.Popen[str], list[int]]:
    program = PROGRAM.format(engine=engine, waiting=waiting)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    assert all(line.startswith("pid ") for line in lines), (lines, process.communicate()[1])
    return process, [int(line.split()[1]) for line in lines]


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.parametrize("waiting", ["call", "sleep"])
def test_ctrl_c_ends_all_processes(waiting: str, wait_until: Any) -> None:
    process, pids = started("shared_memory", waiting)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in stderr.splitlines()[-1]
    assert process.returncode == -signal.SIGINT
    wait_until(lambda: all(map(gone, pids)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_the_program_however_it_ends(
    number: signal.Signals, wait_until: Any
) -> None:
    process, pids = started("shared_memory", "sleep")
    process.send_signal(number)
    process.communicate(timeout=30)
    wait_until(lambda: all(map(gone, pids)))


def test_ctrl_c_wakes_threads_that_wait_for_one_another() -> None:
    program = """
import sys, threading, time
import roundelay as rd

def first(comm):
    if comm.rank == 0:
        while not stop.is_set():
            time.sleep(0.01)
    else:
        try:
            comm.barrier()
        finally:
            stop.set()
    print("here", flush=True)

stop = threading.Event()
print("go", flush=True)
try:
    rd.run(first, ranks=3, engine="threads")
except KeyboardInterrupt:
    names = [t.name for t in threading.enumerate()]
    print("left:", [n for n in names if n.startswith("rank")])
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=30)
    assert stdout.splitlines()[-1] == "left: []"


def test_ctrl_c_says_for_which_thread_it_waits_and_twice_waits_for_none() -> None:
    program = """
import os, time
import roundelay as rd

def work(comm):
    comm.barrier()
    os.write(1, b"here\\n")
    if comm.rank == 1:
        time.sleep(600)
    comm.barrier()

rd.run(work, ranks=3, engine="threads")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(3):
        assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    told = process.stderr.readline()  # on a busy machine the others may be late, too
    assert "to come back from your code" in told
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in stderr.splitlines()[-1]


@pytest.mark.parametrize("code", [0, 3, None])
def test_a_rank_that_exits_fails_also_as_a_thread(code: int | None) -> None:
    """Its caller would end by it, and with 0 look like a success."""

    def leave(comm: rd.Communicator) -> None:
        if comm.rank == 1:
            sys.exit(code)
        comm.barrier()

    with pytest.raises(RankFailed, match="rank 1 raised SystemExit"):
        rd.run(leave, 2, "threads")
