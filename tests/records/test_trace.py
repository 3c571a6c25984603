"""Runs that are traced: every call of every rank is in the files, whatever ends the rank."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import roundelay as rd
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError, RankFailed
from roundelay.records import RunRecord, read_run

WORK = """
import os, signal, sys
import numpy as np
import roundelay as rd
comm = rd.init()
x = np.ones(4)
for _ in range(5):
    comm.all_reduce(x)
print("ready", flush=True)
{then}
"""


def work(comm: Communicator) -> None:
    x, rows = np.ones(6), np.ones((comm.size, 3))
    comm.all_reduce(x)
    comm.reduce_scatter(rows)
    handles = [comm.start.all_reduce(np.ones(1000)) for _ in range(3)]
    for handle in handles:
        handle.wait()
    half = comm.split(comm.rank % 2)
    if half is not None:
        half.barrier()
    comm.all_gather(x)


def traced(folder: Path, size: int, engine: str, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    monkeypatch.setenv("RD_TRACE", str(folder))
    rd.run(work, size, engine)
    return read_run(folder)


@pytest.mark.parametrize("engine", ["threads", "shared_memory"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_every_call_of_every_rank_is_there(
    tmp_path: Path, size: int, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = traced(tmp_path, size, engine, monkeypatch)
    assert [record.rank for record in run.ranks] == [*range(size)]
    same: dict[tuple[int, int], Counter[tuple[str, int, str]]] = {}
    for _, event in run.calls():
        assert event.ended is not None
        assert event.asked <= event.began <= event.ended
        assert 0 <= event.waited <= event.ended - event.began
        assert not event.failed
        what = event.collective, event.nbytes, event.dtype
        same.setdefault((event.group, event.call), Counter())[what] += 1
    for (group, _), calls in same.items():  # all ranks of a group made the same call
        assert [*calls.values()] == [len(run.members(group))]
    for record in run.ranks:
        mine = Counter(event.collective for event in record.events)
        assert mine["all_reduce"] == 4
        assert mine["reduce_scatter"] == mine["barrier"] == 1
        beside = [event for event in record.events if event.thread != record.main_thread]
        assert [(event.collective, event.nbytes) for event in beside] == [("all_reduce", 8000)] * 3
        lines = {event.site.rpartition("/")[2].partition(":")[0] for event in record.events}
        assert "test_trace.py" in lines


def test_who_waits_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RD_TRACE", str(tmp_path))

    def late(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(0.3)
        comm.barrier()

    rd.run(late, 3)
    for rank, event in read_run(tmp_path).calls():
        if event.collective == "barrier" and rank != 1:
            assert event.waited > 0.1e9
            if event.waits_for == 1:
                return
    pytest.fail("nobody waited for rank 1")


def test_without_the_variable_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RD_TRACE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert rd.run(lambda comm: comm.trace is None, 2) == [True, True]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("engine", ["threads", "shared_memory"])
def test_all_ranks_refuse_a_folder_that_one_can_not_write(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RD_TRACE", str(tmp_path / "file"))
    kind = InvalidArgumentError if engine == "threads" else RankFailed
    with pytest.raises(kind, match=r"RD_TRACE=.*ranks 0, 1, 2 can't write there: File exists"):
        rd.run(work, 3, engine)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_is_killed_leaves_all_it_did(tmp_path: Path, end: signal.Signals) -> None:
    script = tmp_path / "script.py"
    # Rank 1 dies in the midst of a call for which rank 0 does not come.
    script.write_text(
        WORK.format(
            then=f"""
import time
if comm.rank == 0:
    time.sleep(1.0)
    sys.exit(0)
signal.alarm(60)
import threading
threading.Timer(0.5, lambda: os.kill(os.getpid(), {int(end)})).start()
comm.barrier()
"""
        )
    )
    folder = tmp_path / "traces"
    command = [sys.executable, "-m", "roundelay", "run", "-n", "2", "--trace", str(folder)]
    subprocess.run([*command, str(script)], capture_output=True, timeout=60, check=False)
    run = read_run(folder)
    assert len(run.ranks) == 2
    for record in run.ranks:
        calls = [event for event in record.events if event.collective == "all_reduce"]
        assert [event.ended is not None for event in calls] == [True] * 5
    last = run.ranks[1].events[-1]
    assert last.collective == "barrier"
    if end == signal.SIGKILL:
        assert last.ended is None


def test_a_call_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RD_TRACE", str(tmp_path))

    def differ(comm: Communicator) -> None:
        comm.all_reduce(np.ones(4 if comm.rank else 5))

    with pytest.raises(RankFailed):
        rd.run(differ, 2)
    failed = [event.failed for _, event in read_run(tmp_path).calls()
              if event.collective == "all_reduce"]  # fmt: skip
    assert failed == [True, True]


def test_files_are_the_user_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "traces"
    traced(folder, 2, "shared_memory", monkeypatch)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("engine", ["threads", "shared_memory", "gloo"])
def test_messages_are_taken_down(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as it was posted, in front or in the background, until it was waited for."""
    if engine == "gloo":
        pytest.importorskip("torch")
    monkeypatch.setenv("RD_TRACE", str(tmp_path))
    rd.run(talk, 2, engine)
    for record in read_run(tmp_path).ranks:
        other = 1 - record.rank
        found = Counter((event.name, event.nbytes) for event in record.events
                        if event.kind == "message")  # fmt: skip
        received = "any rank" if record.rank == 0 else "rank 0"
        assert found == {(f"send to rank {other}", 800): 2, (f"recv from {received}", 800): 2}
        assert all(event.ended is not None and not event.failed for event in record.events
                   if event.kind == "message")  # fmt: skip


def talk(comm: Communicator) -> None:
    other = 1 - comm.rank
    x, into = np.ones(100), np.empty(100)
    source = rd.ANY if comm.rank == 0 else 0
    comm.sendrecv(x, other, into, source)
    sent, came = comm.start.send(x, other, tag=5), comm.start.recv(into, source, tag=5)
    came.wait(), sent.wait()


def test_calls_of_torch_s_backend_are_taken_down(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script, folder = tmp_path / "script.py", tmp_path / "traces"
    script.write_text(TORCH)
    command = [sys.executable, "-m", "roundelay", "run", "-n", "2", "--trace", str(folder)]
    done = subprocess.run([*command, str(script)], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    run = read_run(folder)
    assert len(run.ranks) == 2
    for record in run.ranks:
        calls = Counter(event.collective for event in record.events if event.kind == "call")
        assert calls["all_reduce"] == 4
        assert {"send to rank 1", "recv from rank 0"} & {event.name for event in record.events}
        lines = [event.site for event in record.events if event.collective == "all_reduce"]
        assert all("script.py:" in line for line in lines)


TORCH = """
import torch, torch.distributed as dist
import roundelay.torch
dist.init_process_group("roundelay")
x = torch.ones(1000)
for _ in range(3):
    dist.all_reduce(x)
dist.all_reduce(x, async_op=True).wait()
(dist.send if dist.get_rank() == 0 else dist.recv)(x, 1 - dist.get_rank())
some = dist.new_group([0, 1])  # another group, which is not taken down
dist.all_reduce(x, group=some)
dist.destroy_process_group()
"""


RUNS = 12  # of each way of a race, at least


@pytest.mark.parametrize("engine", ["threads", "shared_memory"])
def test_the_way_that_really_ran_is_told(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A race tries algorithms in turn: each call's event has its own, the same on all ranks."""

    def raced(comm: Communicator) -> None:
        x, arena = np.ones(100_000), comm.empty(100_000)
        for _ in range(8 * RUNS):
            comm.scan(x)
        for _ in range(3):
            comm.all_reduce(arena)
        comm.barrier()

    monkeypatch.setenv("RD_TRACE", str(tmp_path))
    rd.run(raced, 2, engine)
    run = read_run(tmp_path)
    told: dict[tuple[str, int], set[tuple[str, str]]] = {}
    for _, event in run.calls():
        told.setdefault((event.collective, event.call), set()).add((event.algorithm, event.way))
    assert all(len(each) == 1 for each in told.values())
    found = {name: {one for (other, _), each in told.items() if other == name for one in each}
             for name in ("scan", "all_reduce", "barrier")}  # fmt: skip
    assert found["scan"] == {
        (algorithm, way)
        for algorithm in ("direct", "pipeline")
        for way in ("slots", "slots past caches")
    }
    assert found["all_reduce"] == {("two_shot", "arena")}
    assert found["barrier"] == {("dissemination", "slots")}
