"""New arrays out of the arena, by numpy's hook for allocators."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.errors import InvalidArgumentError


def address(x: Any) -> int:
    return int(x.ctypes.data)


def arena_bytes(comm: Any) -> int:
    """Return how far the arena is in use, once all that was given back is counted as free."""
    gc.collect()
    comm.barrier()
    world = comm._engine.world
    if comm.rank == 0:
        world.release(world.allocate(1), 1)
    comm.barrier()
    used = int(world.used)
    comm.barrier()
    return used


def holds(comm: Any, x: Any) -> bool:
    return bool(comm._engine.world.holds(address(x)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_arena_arrays_come_from_the_arena_and_go_back(size: int, ranks: Any) -> None:
    def work(comm: Any) -> None:
        before = arena_bytes(comm)
        outer = np.ones(50_000)
        with rd.arena_arrays(comm):
            made = [np.ones(50_000), np.zeros((300, 300)), np.empty(4096), outer * 2]
            small = np.ones(4095)
            made.append(made[1].astype(np.float32))
            with pytest.raises(KeyError), rd.arena_arrays(comm):
                raise KeyError
            inner = outer.copy()
        after = outer.copy()
        assert [holds(comm, x) for x in made] == [True] * 5
        assert holds(comm, inner)
        assert not any(holds(comm, x) for x in (small, outer, after))
        assert (made[1] == 0).all()
        assert comm.register(made) == sum(x.nbytes for x in made)
        assert (comm.all_reduce(made[0]) == comm.size).all()
        made[3].resize(200_000, refcheck=False)
        assert (made[3][:50_000] == 2).all()
        assert (made[3][50_000:] == 0).all()
        assert holds(comm, made[3])
        made[3].resize(10, refcheck=False)
        assert (made[3] == 2).all()
        del made, inner
        assert arena_bytes(comm) == before

    ranks(size, work)


def test_arena_arrays_are_for_this_thread_alone(threads: Any) -> None:
    def work(comm: Any) -> None:
        found: list[Any] = []
        with rd.arena_arrays(comm):
            other = threading.Thread(target=lambda: found.append(np.ones(50_000)))
            other.start()
            other.join()
        assert not holds(comm, found[0])

    threads(2, work)


def test_arena_arrays_that_find_no_room_say_so(ranks: Any) -> None:
    def work(comm: Any) -> None:
        with rd.arena_arrays(comm):
            with pytest.raises(MemoryError):
                np.ones(1 << 20)
            x = np.ones(50_000)
        assert (comm.all_reduce(x) == comm.size).all()

    ranks(2, work, arena=3 << 20)


def test_arena_arrays_in_a_forked_child_are_ordinary(processes: Any) -> None:
    def work(comm: Any) -> None:
        with rd.arena_arrays(comm):
            x = np.ones(50_000)
            pid = os.fork()
            if pid == 0:
                status = 3
                try:
                    y = x * 2
                    del x
                    status = int(holds(comm, y)) or int(y.sum() != 100_000)
                finally:
                    os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert (comm.all_reduce(x) == comm.size).all()

    processes(2, work)


def test_arena_arrays_needs_a_communicator() -> None:
    with pytest.raises(InvalidArgumentError, match="arena_arrays needs a communicator"):
        rd.arena_arrays(3).__enter__()  # type: ignore[arg-type]
