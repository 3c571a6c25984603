"""Ranks as forked processes of the test, and proof that none of them is left."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roundelay.rendezvous.one_host import Job


class Forked:
    """A function in a process of its own; what it returns or raises comes back as text."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                text = f"{fn(*args)}"
            except BaseException as error:  # noqa: BLE001 - the parent looks at it
                text = f"{type(error).__name__}: {error}"
            os.write(writer, text.encode())
            os._exit(0)
        os.close(writer)

    def result(self, *, seconds: float = 30) -> str:
        """Wait for its end; what it said, or the signal that killed it."""
        text = b""
        while select.select([self._reader], [], [], seconds)[0]:
            data = os.read(self._reader, 65536)
            if not data:
                break
            text += data
        else:
            self.kill()
            pytest.fail(f"process {self.pid} did not end; so far it said {text!r}")
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return text.decode() if code >= 0 else signal.Signals(-code).name

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    def close(self) -> None:
        self.kill()
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1


@pytest.fixture
def forked() -> Iterator[Callable[..., Forked]]:
    """Start functions in processes of their own; they are gone after the test."""
    started: list[Forked] = []

    def start(fn: Callable[..., Any], *args: Any) -> Forked:
        sys.stdout.flush()
        started.append(Forked(fn, *args))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[[int], Job]:
    """Name a job whose ranks meet in the directory of the test."""
    return lambda size: Job("test", size, tmp_path)


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Wait for something to become true, and fail if it does not."""

    def wait(condition: Callable[[], bool], *, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                pytest.fail("it did not happen")
            time.sleep(0.01)

    return wait


def children_of(task: Path) -> list[str]:
    """Return the processes that a thread has started; none if it has just ended."""
    try:
        return (task / "children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def ranks_here() -> set[str]:
    """Return the processes that this one has started, and its threads that are ranks."""
    tasks = Path("/proc/self/task").iterdir()
    processes = {pid for task in tasks for pid in children_of(task)}
    return processes | {
        f"{thread.name} {thread.ident}"
        for thread in threading.enumerate()
        if thread.name.startswith("rank ")
    }


@pytest.fixture
def no_children() -> Iterator[None]:
    """Fail if the test leaves a process or a thread of a rank behind."""
    before = ranks_here()
    yield
    assert ranks_here() <= before
