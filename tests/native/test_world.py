"""The shared memory: of one job and user only, never in the file system, given back in full."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_core: Any = pytest.importorskip("roundelay._core")
if not hasattr(_core, "World"):
    pytest.skip("ranks of one host need Linux", allow_module_level=True)


def test_it_has_no_name_and_only_its_user_may_open_it() -> None:
    world = _core.World.create(3)
    info = os.fstat(world.fd)
    assert info.st_nlink == 0
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_uid == os.geteuid()
    assert not os.get_inheritable(world.fd)
    assert "memfd:roundelay" in str(Path(f"/proc/self/fd/{world.fd}").readlink())


def test_it_never_shrinks_under_a_running_job() -> None:
    world = _core.World.create(2)
    for size in (0, os.fstat(world.fd).st_size * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(world.fd, size)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_can_neither_open_nor_attach_it() -> None:
    world = _core.World.create(2)
    pid = os.fork()
    if pid == 0:
        reached = 2
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                os.open(f"/proc/{os.getppid()}/fd/{world.fd}", os.O_RDWR)
            except PermissionError:
                reached -= 1
            try:
                _core.World.attach(world.fd, world.token)
            except RuntimeError as error:
                reached -= "not of this user" in str(error)
        finally:
            os._exit(reached)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_foreign_memory_is_never_attached(tmp_path: Path) -> None:
    world = _core.World.create(2)
    other = _core.World.create(2)
    again = _core.World.attach(world.fd, world.token)
    assert (again.size, again.token, again.fd != world.fd) == (2, world.token, True)
    for token in (other.token, b"", bytes(16), world.token + b"x", world.token[:-1]):
        with pytest.raises(RuntimeError, match="another job"):
            _core.World.attach(world.fd, token)
    plain = tmp_path / "plain"
    for content in (b"", b"x" * 100, b"\0" * 100_000):
        plain.write_bytes(content)
        with plain.open("r+b") as file, pytest.raises(RuntimeError):
            _core.World.attach(file.fileno(), bytes(16))
    # A copy of the first pages of a real one: right magic, right token, wrong length.
    plain.write_bytes(os.pread(world.fd, 1 << 16, 0))
    with plain.open("r+b") as file, pytest.raises(RuntimeError):
        _core.World.attach(file.fileno(), world.token)
    with pytest.raises(RuntimeError):
        _core.World.attach(10_000, world.token)


def test_memory_goes_back_and_comes_back_zeroed() -> None:
    world = _core.World.create(1, 1 << 24)
    start = world.used
    sizes = [1, 4096, 5000, 1 << 20]
    for _ in range(20):
        places = [world.allocate(size) for size in sizes]
        assert len(set(places)) == len(places)
        for place, size in zip(places, sizes, strict=True):
            assert os.pread(world.fd, size, place) == bytes(size)
            os.pwrite(world.fd, b"\xff" * size, place)
        for place, size in zip(reversed(places), reversed(sizes), strict=True):
            world.release(place, size)
        assert world.used == start
    held = world.allocate(1 << 20), world.allocate(1 << 20)
    world.release(held[0], 1 << 20)
    again = world.allocate(1 << 20)
    assert again == held[0]
    assert os.pread(world.fd, 1 << 20, again) == bytes(1 << 20)


def test_too_much_is_refused_and_changes_nothing() -> None:
    world = _core.World.create(1, 1 << 20)
    used = world.used
    for size in (1 << 21, 1 << 62):
        with pytest.raises(MemoryError, match="left, not"):
            world.allocate(size)
    assert world.used == used
    world.allocate(1 << 19)


def test_the_first_trouble_wins() -> None:
    world = _core.World.create(3)
    assert world.trouble is None
    world.fail("failed", 1, "first " + "x" * 10_000)
    world.fail("failed", 2, "second")
    trouble: Any = world.trouble
    kind, culprit, _, _, _, text = trouble
    assert (kind, culprit, text[:6]) == ("failed", 1, "first ")
    assert len(text) < 1000


SCRIPT = """
import threading
import numpy as np
from roundelay import _core
from roundelay.communicator import Communicator
from roundelay.communicator.selection import Selection
from roundelay.engines.shared_memory import SharedMemory
from roundelay.errors import RoundelayError

def rank(world, number, out):
    world.enter(number)
    comm = Communicator(SharedMemory(world, number, Selection(world.size)))
    # Last what meets all: who is done with a scan may be ahead of the others, and fail before them.
    rows = [comm.scan(np.ones(2)).tolist(), comm.all_reduce(np.arange(9.0) / 7).tolist()]
    for call in (
        lambda: comm.all_reduce([1]),
        lambda: comm.broadcast(np.ones(1), 9),
        lambda: comm.all_reduce(np.ones(3), out=np.ones(4)),
        lambda: comm.all_gather(np.ones(3 + number)),
    ):
        try:
            call()
        except RoundelayError as error:
            rows.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    out[number] = rows

world, out = _core.World.create(3), {}
threads = [threading.Thread(target=rank, args=(world, n, out)) for n in range(3)]
[t.start() for t in threads], [t.join() for t in threads]
print([out[n] for n in range(3)])
"""


def test_optimized_python_does_the_same() -> None:
    """Nothing that users rely on is an assertion."""
    said = [
        subprocess.run(
            [sys.executable, *flags, "-c", SCRIPT], capture_output=True, text=True, check=True
        ).stdout
        for flags in ([], ["-O"], ["-OO"])
    ]
    assert said[0].count("CollectiveMismatch") == 3
    assert said[0].count("InvalidArgumentError") == 9
    assert said[1] == said[0]
    assert said[2] == said[0]


@pytest.mark.parametrize("ranks", [2, 16, 50])
def test_few_ranks_have_all_of_it_set_aside(ranks: int) -> None:
    world = _core.World.create(ranks)
    assert os.fstat(world.fd).st_blocks * 512 == _core.World.bytes_for(ranks)


@pytest.mark.parametrize("ranks", [64, 256, 512])
def test_many_ranks_have_set_aside_what_each_needs(ranks: int) -> None:
    world = _core.World.create(ranks)
    cells = 48 * 1024  # and records: what ranks show one another
    assert 0 < os.fstat(world.fd).st_blocks * 512 < ranks * (cells + 8192)
