"""Worlds of threads and of forked processes: run a function on every rank, see how it ended.

Ranks are made by hand here, below the launcher, so that a test can kill, stop or forget one of them
and nobody else interferes.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

_core = pytest.importorskip("roundelay._core")
if not hasattr(_core, "World"):
    pytest.skip("ranks of one host need Linux", allow_module_level=True)

from roundelay.communicator import Communicator  # noqa: E402 - only where it can be imported
from roundelay.communicator.selection import Selection  # noqa: E402 - likewise
from roundelay.engines.shared_memory import SharedMemory  # noqa: E402 - likewise
from roundelay.processes.death import raised  # noqa: E402 - likewise

GIVE_UP = 60.0  # seconds after which a test world counts as hanging


@dataclass
class Outcome:
    """How one rank ended: with a value, with an exception, or by a signal."""

    value: Any = None
    error: str = ""  # the class of the exception
    message: str = ""
    trace: str = ""
    ended: float = 0.0  # by the monotonic clock
    signal: int = 0
    gone: float = 0.0  # when its process was seen to be no more


class Ranks:
    """Runs functions on every rank of a fresh world."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return self.kind

    def outcomes(self, size: int, fn: Callable[[Any], Any], **options: Any) -> list[Outcome]:
        """Return how every rank ended."""
        run = _on_threads if self.kind == "threads" else _on_processes
        return run(size, fn, options)

    def side_by_side(self, size: int, fns: Sequence[Callable[[Any], Any]]) -> list[list[Outcome]]:
        """Return how every rank of several worlds of processes ended, all running at once."""
        worlds = [_fork(size, fn, {}) for fn in fns]
        found = _collect([rank for world in worlds for rank in world])
        return [found[start : start + size] for start in range(0, len(found), size)]

    def __call__(self, size: int, fn: Callable[[Any], Any], **options: Any) -> list[Any]:
        """Return every rank's value; fail if any rank did."""
        found = self.outcomes(size, fn, **options)
        wrong = [f"rank {rank}: {one.trace}" for rank, one in enumerate(found) if one.error]
        assert not wrong, "\n".join(wrong)
        assert not any(one.signal for one in found), found
        return [one.value for one in found]


def _attempt(world: Any, rank: int, fn: Callable[[Any], Any], options: dict[str, Any]) -> Outcome:
    world.enter(rank)
    comm = Communicator(SharedMemory(world, rank, Selection(world.size), **options))
    try:
        found = Outcome(fn(comm))
        ended = time.monotonic()
        comm.close()
    except BaseException as error:  # noqa: BLE001 - how it ended is what the test asks
        found = Outcome(None, type(error).__name__, str(error), traceback.format_exc())
        ended = time.monotonic()
        comm._engine.fail(*raised(type(error), error))
        comm._engine.close()
    found.ended = ended
    return found


def _create(size: int, options: dict[str, Any]) -> Any:
    arena = options.pop("arena", None)
    return _core.World.create(size) if arena is None else _core.World.create(size, arena)


def _on_threads(size: int, fn: Callable[[Any], Any], options: dict[str, Any]) -> list[Outcome]:
    world = _create(size, options)
    found: list[Outcome] = [Outcome(error="Hang", trace="did not end") for _ in range(size)]

    def run(rank: int) -> None:
        found[rank] = _attempt(world, rank, fn, dict(options))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + GIVE_UP
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    return found


def _on_processes(size: int, fn: Callable[[Any], Any], options: dict[str, Any]) -> list[Outcome]:
    return _collect(_fork(size, fn, options))


def _fork(size: int, fn: Callable[[Any], Any], options: dict[str, Any]) -> list[tuple[int, int]]:
    """Start the ranks; return each one's process and the pipe that brings its answer."""
    world = _create(size, options)
    lives = [os.pipe() for _ in range(size)]
    answers = [os.pipe() for _ in range(size)]
    pids = []
    for rank in range(size):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # forking a process with threads, on purpose
            pid = os.fork()
        if pid == 0:
            _be_rank(world.fd, world.token, rank, lives, answers, fn, options)
        pids.append(pid)
    for _, write in (*lives, *answers):
        os.close(write)
    for read, _ in lives:
        os.close(read)
    return [(pid, read) for pid, (read, _) in zip(pids, answers, strict=True)]


def _be_rank(
    fd: int,
    token: bytes,
    rank: int,
    lives: list[tuple[int, int]],
    answers: list[tuple[int, int]],
    fn: Callable[[Any], Any],
    options: dict[str, Any],
) -> None:
    """Be a rank until the end of the process; never returns."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for other, (read, write) in enumerate(lives):
            os.close(read if other == rank else write)
            if other != rank:
                os.close(answers[other][1])
        world = _core.World.attach(fd, token)
        world.watch(
            [-1 if o == rank else read for o, (read, _) in enumerate(lives)], lives[rank][1]
        )
        found = _attempt(world, rank, fn, options)
    except BaseException:  # noqa: BLE001 - a broken test must not run on in the child
        found = Outcome(error="BrokenTest", trace=traceback.format_exc())
    with os.fdopen(answers[rank][1], "wb") as file:
        file.write(pickle.dumps(found))
    os._exit(0)


def _collect(started: list[tuple[int, int]]) -> list[Outcome]:
    limit = time.monotonic() + GIVE_UP
    parts = {fd: b"" for _, fd in started}
    gone: dict[int, float] = {}
    while len(gone) < len(parts) and time.monotonic() < limit:
        ready, _, _ = select.select([fd for fd in parts if fd not in gone], [], [], 0.5)
        for fd in ready:
            data = os.read(fd, 1 << 20)
            parts[fd] += data
            if not data:
                gone[fd] = time.monotonic()
    for pid, fd in started:
        os.close(fd)
        if fd not in gone:
            os.kill(pid, signal.SIGKILL)
    return [_ended(os.waitpid(pid, 0)[1], parts[fd], gone.get(fd)) for pid, fd in started]


def _ended(status: int, answer: bytes, gone: float | None) -> Outcome:
    if gone is None:
        return Outcome(error="Hang", trace="did not end")
    found = Outcome(error="Vanished", trace="ended without an answer")
    if answer:
        found = pickle.loads(answer)
    elif os.WIFSIGNALED(status):
        found = Outcome(signal=os.WTERMSIG(status))
    found.gone = gone
    return found


@pytest.fixture(params=["threads", "processes"], scope="session")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(request.param)


@pytest.fixture(scope="session")
def threads() -> Ranks:
    return Ranks("threads")


@pytest.fixture(scope="session")
def processes() -> Ranks:
    return Ranks("processes")
