"""Files, processes and threads run out: a typed error with the way out, and nothing left behind."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.errors import LimitError, RendezvousError

#: Runs jobs under every limit on open files from what is open to plenty.
FEWER_AND_FEWER = """
import gc, json, os, resource, sys
import numpy as np
import roundelay as rd

def opened():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

def try_it():
    try:
        return rd.run(lambda comm: float(comm.all_reduce(np.ones(1))[0]), 3)
    except Exception as error:
        return [type(error).__name__, str(error)]

try_it()
before, found = opened(), []
for more in range(20, 0, -1):  # the hard limit too, which does not go up again
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + more, before + more))
    result = try_it()
    try:
        children = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        children = None
    found.insert(0, [result, opened() - before, children])
print(json.dumps(found))
"""


def test_without_descriptors_the_way_out_is_told_and_none_is_lost(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FEWER_AND_FEWER], capture_output=True, text=True, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [left for _, left, _ in found] == [0] * len(found)
    assert [children for _, _, children in found] == [None] * len(found)
    results = [result for result, _, _ in found]
    assert results[-1] == [3.0] * 3
    failed = [result for result in results if result != [3.0] * 3]
    assert failed
    assert results.index([3.0] * 3) == len(failed)  # enough is enough
    for kind, message in failed:
        assert kind == "LimitError", message
        assert "a job of 3 ranks" in message
        assert "`ulimit -n " in message


def opened() -> int:
    gc.collect()  # an error holds what its frames do
    return len(list(Path("/proc/self/fd").iterdir()))


#: One rank of three, poor in descriptors where it is told to be.
POOR = """
import os, resource
import roundelay as rd
if "MORE" in os.environ:
    now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, [now + int(os.environ["MORE"])] * 2)
try:
    print("ok", rd.init(timeout=5).rank)
except rd.RoundelayError as error:
    print(type(error).__name__, error)
"""


POOR_RANKS = [(0, 0), (0, 3), (0, 6), (1, 0), (1, 2), (1, 3)]


def started(poor: int, more: int, folder: Path) -> list[subprocess.Popen[str]]:
    """Start three ranks, one of which may open only so many more files."""
    folder.mkdir()
    common = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": "29500", "TMPDIR": str(folder)}  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, "-c", POOR],
            env={**common, "RANK": str(rank), **({"MORE": str(more)} if rank == poor else {})},
            text=True,
            stdout=subprocess.PIPE,
        )
        for rank in range(3)
    ]


@pytest.fixture(scope="module")
def poor_jobs(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[int, int], tuple[list[str], Path]]:
    """Return what the ranks of each job said, and where they met; all wait at the same time."""
    folder = tmp_path_factory.mktemp("poor")
    places = {case: folder / f"{case[0]}-{case[1]}" for case in POOR_RANKS}
    jobs = {case: started(*case, place) for case, place in places.items()}
    return {
        case: ([process.communicate(timeout=60)[0] for process in job], places[case])
        for case, job in jobs.items()
    }


@pytest.mark.parametrize(("poor", "more"), POOR_RANKS)
def test_a_rank_that_is_poor_in_descriptors_says_so(
    poor: int, more: int, poor_jobs: dict[tuple[int, int], tuple[list[str], Path]]
) -> None:
    said, folder = poor_jobs[poor, more]
    assert said[poor].startswith("LimitError rank"), said
    assert "`ulimit -n " in said[poor]
    assert all(text.startswith("RendezvousError") for rank, text in enumerate(said) if rank != poor)
    assert list(folder.iterdir()) == []


#: Runs jobs as a user who may have ever more processes: this, three ranks, and a thread of each.
MORE_AND_MORE = """
import ctypes, gc, json, os, resource
import roundelay as rd

def opened():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

def try_it():
    try:
        return rd.run(lambda comm: comm.rank, 3)
    except Exception as error:
        return [type(error).__name__, str(error)]

try_it()
own = 1_000_000 + os.getpid()  # nobody else's
os.setresuid(own, own, own)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # so that it may still look at itself
before, found = opened(), []
for most in range(1, 9):
    resource.setrlimit(resource.RLIMIT_NPROC, (most, 9))
    result = try_it()
    try:
        children = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        children = None
    found.append([result, opened() - before, children])
print(json.dumps(found))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has no limit that it could not lift")
def test_without_processes_those_started_are_ended(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MORE_AND_MORE], capture_output=True, text=True, check=False,
        cwd=tmp_path, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [left for _, left, _ in found] == [0] * 8
    assert [children for _, _, children in found] == [None] * 8
    assert [result for result, _, _ in found[6:]] == [[0, 1, 2]] * 2
    for (kind, message), _, _ in found[:6]:
        assert kind == "LimitError", message
        assert re.match(r"(a job of 3 ranks|rank \d of 3): .*processes or threads", message)
        assert "`ulimit -u`" in message


@pytest.mark.parametrize("good", [0, 1, 2])
def test_without_threads_those_started_are_ended(
    good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    made: list[threading.Thread] = []

    def few(thread: Any) -> None:
        if thread.name.startswith("rank "):
            if len(made) == good:
                raise RuntimeError("can't start new thread")
            made.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few)
    with pytest.raises(LimitError, match=r"a job of 3 ranks: .*processes or threads"):
        rd.run(lambda comm: comm.all_reduce(np.ones(1)), 3, "threads")
    assert not any(thread.is_alive() for thread in made)


NO_SPACE = """
import resource
from roundelay.processes.limits import limit_hit

pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + (4 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
print(limit_hit("a job of 3 ranks", RuntimeError("can't start new thread")))
"""


def test_no_address_space_for_a_thread_is_no_lack_of_processes() -> None:
    said = subprocess.run(
        [sys.executable, "-c", NO_SPACE], check=True, capture_output=True, text=True
    ).stdout
    assert "`ulimit -v` is " in said
    assert "ulimit -u" not in said


@pytest.mark.parametrize("place", ["/proc", "/sys", "/dev/null", "/nowhere/at/all"])
def test_a_place_that_can_hold_no_socket_is_named(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    for name, value in {**own, "TMPDIR": place, "XDG_RUNTIME_DIR": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        RendezvousError, match=f"no rendezvous in {place}: .*Set XDG_RUNTIME_DIR or TMP"
    ):
        rd.init(timeout=3)


def test_the_launcher_names_the_limit_too(tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    script.write_text("")
    command = f"ulimit -n 40; exec {sys.executable} -m roundelay run -n 20 {script}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"rank \d+ can't be started: .*`ulimit -n 1024`", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
