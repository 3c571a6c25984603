"""`roundelay run` as process 1 of a container: it hears signals, and leaves no zombies."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


class Container:
    """A command as process 1 of a PID namespace."""

    def __init__(self, folder: Path, *words: str, **variables: str) -> None:
        self.folder = folder
        self._held = subprocess.Popen(
            [*ALONE, sys.executable, "-m", "roundelay", *words],
            cwd=folder, env={**os.environ, "TMPDIR": str(folder), **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def first(self) -> int:
        """Return the id of its process 1, as it is called out here."""
        path = Path(f"/proc/{self._held.pid}/task/{self._held.pid}/children")
        until(lambda: path.read_text().split() != [])
        return int(path.read_text().split()[0])

    def lines(self, count: int) -> list[str]:
        assert self._held.stdout is not None
        return [self._held.stdout.readline().rstrip("\n") for _ in range(count)]

    def end(self) -> tuple[int, str]:
        _, errors = self._held.communicate(timeout=200)
        return self._held.returncode, errors

    def close(self) -> None:
        if self._held.poll() is None:
            self._held.kill()
            self._held.communicate()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 200
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


Contain = Callable[..., Container]


@pytest.fixture
def contain(tmp_path: Path) -> Iterator[Contain]:
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], check=False).returncode:
        pytest.skip("PID namespaces are not allowed here")
    started: list[Container] = []

    def start(*words: str, **variables: str) -> Container:
        started.append(Container(tmp_path, *words, **variables))
        return started[-1]

    yield start
    for each in started:
        each.close()


BOTH = {"saved-0": "once ", "saved-1": "once "}
RANK = """
import os, signal, sys, time

def saves(*_):
    time.sleep(0.5)
    with open(f"saved-{os.environ['RANK']}", "a") as file:
        file.write("once ")
    sys.exit(0)

habit = {"plain": signal.SIG_DFL, "saves": saves, "stubborn": signal.SIG_IGN}[sys.argv[1]]
signal.signal(signal.SIGTERM, habit)
os.write(1, b"ready\\n")  # at once: ranks may share one output
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize("habit", ["plain", "saves", "stubborn"])
def test_sigterm_ends_ranks_in_order_and_within_the_grace_period(
    contain: Contain, tmp_path: Path, habit: str
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    # Who saves has time for it; whom nothing moves is killed.
    grace = "2" if habit == "stubborn" else "60"
    job = contain("run", "-n", "2", "--shutdown-timeout", grace, "rank.py", habit)
    assert sorted(job.lines(2)) == ["[0] ready", "[1] ready"]
    os.kill(job.first(), signal.SIGTERM)
    assert job.end() == (128 + signal.SIGTERM, "roundelay: ended by SIGTERM.\n")
    saved = {path.name: path.read_text() for path in tmp_path.glob("saved-*")}
    assert saved == (BOTH if habit == "saves" else {})


def test_torchrun_ends_them_so_too(contain: Contain, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    place = {"PET_MAX_RESTARTS": "1", "PET_NPROC_PER_NODE": "2", "PET_NNODES": "1"}
    job = contain("run", "rank.py", "saves", **place)
    assert job.lines(2) == ["ready", "ready"]
    os.kill(job.first(), signal.SIGTERM)
    code, errors = job.end()
    assert code == 128 + signal.SIGTERM
    assert errors.endswith("roundelay: ended by SIGTERM.\n")
    assert "Traceback" not in errors
    assert {path.name: path.read_text() for path in tmp_path.glob("saved-*")} == BOTH


ORPHAN = """
import os, sys, time
orphan_at, its_id = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(its_id, str(os.getpid()).encode())
        time.sleep(0.5)  # until its parent is gone
    os._exit(0)
os.wait()
orphan = int(os.read(orphan_at, 20))
while os.path.exists(f"/proc/{orphan}"):
    time.sleep(0.02)
print("no zombie is left", flush=True)
sys.exit(3)
"""


def test_orphans_are_waited_for_and_the_exit_code_is_the_jobs(
    contain: Contain, tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(ORPHAN)
    job = contain("run", "-n", "1", "rank.py")
    assert job.lines(1) == ["[0] no zombie is left"]
    assert job.end()[0] == 3


def test_a_pod_that_waits_for_others_hears_sigterm(contain: Contain, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("")
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    place = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "1",
             "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}  # fmt: skip
    job = contain("run", "rank.py", **place)

    def listening() -> bool:
        with socket.socket() as asks:
            return asks.connect_ex(("127.0.0.1", port)) == 0

    until(listening)
    os.kill(job.first(), signal.SIGTERM)
    assert job.end()[0] == 128 + signal.SIGTERM


def test_other_commands_hear_it_too(contain: Contain) -> None:
    job = contain("prove", "--sizes", "1-64")
    # Python has started and the work has begun once there is a second process.
    children = Path(f"/proc/{job.first()}/task/{job.first()}/children")
    until(lambda: children.read_text().split() != [])
    os.kill(job.first(), signal.SIGTERM)
    assert job.end()[0] == 128 + signal.SIGTERM
