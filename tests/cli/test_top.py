"""`roundelay top`: it names the rank that all wait for, and looks at nobody else's job."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from roundelay import _core
from roundelay.algorithms import algorithms
from roundelay.engines import ENDINGS
from roundelay.errors import OtherVersionError, RoundelayError
from roundelay.live.hang_words import live_say
from roundelay.live.jobs import LiveJob, find_jobs
from roundelay.live.snapshot import RankNow, look
from roundelay.live.watch import JobWatch

Run = Callable[..., Result]
Start = Callable[..., Any]  # the Terminal of conftest.py, which tests can't import

SCRIPT = """
import sys, time
import numpy as np
import roundelay as rd
comm = rd.init(timeout=60)
half = comm.split(comm.rank % 2)
comm.at_step(6)
comm.all_reduce(np.ones(1000))
sys.stdout.write("ready\\n"); sys.stdout.flush()
if comm.rank == {late}:
    time.sleep({seconds})
{call}
"""


class Job:
    """A script on several ranks, until the test is over."""

    def __init__(self, folder: Path, size: int, **words: object) -> None:
        script = folder / "script.py"
        script.write_text(SCRIPT.format(**words))
        command = [sys.executable, "-m", "roundelay", "run", "-n", str(size), str(script)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self.process.stdout is None:
            raise RuntimeError("no output")
        for _ in range(size):
            assert "ready" in self.process.stdout.readline()

    def ranks(self) -> list[int]:
        """Return processes that are ranks of it, as the kernel knows them."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start jobs that end with the test."""
    jobs: list[Job] = []

    def begin(size: int, **words: object) -> Job:
        folder = tmp_path / str(len(jobs))
        folder.mkdir()
        jobs.append(Job(folder, size, **{"late": -1, "seconds": 60, "call": "", **words}))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.terminate()
        job.process.communicate()


def seen(run: Run, pid: int) -> dict[str, Any]:
    result = run("top", "--once", "--json", str(pid))
    assert result.exit_code == 0, result.stderr
    [job] = json.loads(result.stdout)["jobs"]
    return dict(job)


def in_chinese(job: Job) -> Sequence[RankNow]:
    """Look at a job once, as the page in Chinese does."""
    [live] = [one for one in find_jobs() if set(job.ranks()) & set(one.pids)]
    names = tuple(algorithm.short_name for algorithm in algorithms)
    return look(live.world(), names, "zh").ranks


@pytest.mark.parametrize(("size", "late"), [(2, 0), (3, 1), (4, 3), (7, 2)])
def test_it_names_the_rank_that_all_wait_for(
    run: Run, start: Callable[..., Job], size: int, late: int
) -> None:
    job = start(size, late=late, call="comm.barrier()")
    time.sleep(2.5)
    found = seen(run, job.ranks()[0])
    assert found["straggler"] == late
    assert [rank["rank"] for rank in found["ranks"]] == [*range(size)]
    for rank in found["ranks"]:
        assert rank["step"] == 6
        if rank["rank"] == late:
            assert rank["state"] == "computes"
            assert rank["call"].startswith("all_reduce float64[1000]")
            assert rank["site"].endswith("script.py:8")
        else:
            assert rank["state"] == "waits"
            assert rank["call"].startswith("barrier")
            assert rank["site"].endswith("script.py:12")
            assert rank["waited_seconds"] > 1
    # A barrier in a tree may have some wait for others that wait: all lead to the late one.
    assert (
        f"wait{'s' if found['hangs'].startswith('Rank ') else ''} for rank {late}" in found["hangs"]
    )
    assert f"Rank {late} (process" in found["hangs"]
    assert "runs its own code" in found["hangs"]


def test_calls_in_a_group_are_seen(run: Run, start: Callable[..., Job]) -> None:
    job = start(4, late=2, call="half.barrier()")
    time.sleep(2.5)
    ranks = seen(run, job.ranks()[0])["ranks"]
    assert ranks[0]["waits_for"] == 2
    assert re.match(r"in group \d+ \(ranks 0, 2; made at .*script.py:6\)", ranks[0]["group"])
    assert re.match(r"（组 \d+：rank 0、2；创建于 .*script.py:6）", in_chinese(job)[0].group)


def test_receives_are_seen(run: Run, start: Callable[..., Job]) -> None:
    call = "comm.recv(np.ones(3), src=1, tag=7) if comm.rank == 0 else time.sleep(60)"
    job = start(2, call=call)
    time.sleep(1.0)
    rank = seen(run, job.ranks()[0])["ranks"][0]
    assert (rank["state"], rank["waits_for"]) == ("waits", 1)
    assert rank["call"] == "recv from rank 1, tag 7"
    assert in_chinese(job)[0].call == "recv，来自 rank 1，标签 7"


def test_messages_of_anyone_are_told_in_chinese(start: Callable[..., Job]) -> None:
    call = "comm.recv(np.ones(3), src=rd.ANY) if comm.rank == 0 else time.sleep(60)"
    job = start(2, call=call)
    time.sleep(1.0)
    assert in_chinese(job)[0].call.startswith("recv，来自 任意 rank，")


@pytest.mark.parametrize("ending", _core.ENDINGS)
def test_a_rank_that_is_through_is_told_without_a_number(ending: str) -> None:
    english, chinese = (live_say(ending, language) for language in ("en", "zh"))
    assert english.isascii()
    assert not re.search("[A-Za-z ]", chinese)
    record = (61, _core.ENDING, 0, 0, 0, 0, ENDINGS.index(ending), "x.py:1")
    world: Any = SimpleNamespace(
        size=1, trouble=None, group_at=8, life=lambda _: _core.LIVES.index("alive"),
        heartbeat=lambda _: 0, now=lambda _: (8, 61, True, 0), waits=lambda _: [],
        calls=lambda *_: (0, "", [(0, record, record)]), step=lambda _: 0, pid=lambda _: 1,
    )  # fmt: skip
    for language, said in (("en", english), ("zh", chinese)):
        [rank] = look(world, (), language).ranks
        assert (rank.call, rank.number) == (said, 0)


def test_the_stopped_rank_of_the_demo_is_named(run: Run) -> None:
    command = [sys.executable, "-m", "roundelay", "demo", "--fault", "stop", "--timeout", "8"]
    demo = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30
        found: dict[str, Any] = {"hangs": ""}
        while time.monotonic() < until and "wait for" not in found["hangs"]:
            jobs = json.loads(run("top", "--once", "--json").stdout)["jobs"]
            mine = [job for job in jobs if demo.pid in job["processes"] and "ranks" in job]
            found = mine[0] if mine else found
        assert found["straggler"] == 2
        assert found["ranks"][2]["state"] == "stopped"
        assert "for rank 2 in all_reduce #" in found["hangs"]
        assert re.search(r"Rank 2 \(process \d+\) is stopped", found["hangs"])
        shown = run("top", "--once", str(demo.pid))
        assert "stopped" in shown.stdout
        assert "waits for rank 2" in shown.stdout
        assert run("top", "--once", "--ascii", str(demo.pid)).stdout.isascii()
    finally:
        demo.wait()


def test_bytes_are_counted(start: Callable[..., Job]) -> None:
    loop = "while True: comm.all_reduce(np.ones(100000))"
    job = start(2, call=loop)
    [found] = [one for one in find_jobs() if job.process.pid in one.pids or
               set(job.ranks()) & set(one.pids)]  # fmt: skip
    told = JobWatch(found, [""] * 100).for_a_while(0.5)
    assert all(rate > 1e5 for rate in told.rates)
    assert told.now.trouble == ""


def test_several_jobs_are_listed(run: Run, start: Callable[..., Job]) -> None:
    first, second = start(2, call="time.sleep(60)"), start(3, call="time.sleep(60)")
    result = run("top", "--once")
    assert result.exit_code == 0
    for job in (first, second):
        assert any(str(pid) in result.stdout for pid in (*job.ranks(), job.process.pid))
    assert "choose one" in result.stdout


def test_a_process_of_no_job_is_refused(run: Run) -> None:
    result = run("top", "--once", "1")
    assert result.exit_code == 2
    assert "1 is no job of yours" in result.stderr


def test_a_job_of_another_version_is_refused_by_name() -> None:
    fd = os.memfd_create("roundelay")
    os.write(fd, struct.pack("<QII", 0x31796C65646E756F, 99, 2) + bytes(8192))
    try:
        job = LiveJob((0, 0), f"/proc/self/fd/{fd}", (os.getpid(),))
        with pytest.raises(OtherVersionError, match=r"layout 99.* -m roundelay top"):
            job.world()
    finally:
        os.close(fd)


@pytest.mark.parametrize("text", [b"", b"x" * 100, b"x" * 10000])
def test_memory_that_is_no_job_s_is_refused(text: bytes) -> None:
    fd = os.memfd_create("roundelay")
    os.write(fd, text)
    try:
        with pytest.raises(RoundelayError):
            LiveJob((0, 0), f"/proc/self/fd/{fd}", (os.getpid(),)).world()
    finally:
        os.close(fd)


@pytest.mark.parametrize("place", [16, 24, *range(640, 800, 8)])
def test_a_header_that_lies_is_refused_or_read(place: int) -> None:
    """Nothing is looked at that lies beyond the memory, whatever its header says."""
    world = _core.World.create(2, arena=0)
    fd = os.memfd_create("roundelay")
    data = bytearray(os.pread(world.fd, os.fstat(world.fd).st_size, 0))
    data[place : place + 8] = (0x7FFFFFFFFFFFFFC0).to_bytes(8, "little")
    os.write(fd, data)
    try:
        mapped = _core.World.look_on(fd)
    except RuntimeError:
        return
    finally:
        os.close(fd)
    assert len(look(mapped, [""] * 100).ranks) == 2


def test_in_a_terminal_q_ends_it(start: Callable[..., Job], terminal: Start) -> None:
    job = start(2, late=1, call="comm.barrier()")
    screen = terminal("top", str(job.ranks()[0]), "--every", "0.2", columns=70, lines=20)
    screen.wait_for("waits for rank 1")
    screen.send("q")
    assert screen.exit_code() == 0
