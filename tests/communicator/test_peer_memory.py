"""Inputs that are read in other ranks' private memory: the same bits, on all ranks or on none."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundelay import _core, tuning
from roundelay.algorithms import algorithms
from roundelay.engines._native.programs import READABLE
from roundelay.errors import PeerLost
from roundelay.schedule import compile_schedule, prove_program
from roundelay.tuning import default_for

SIZES = (2, 3, 4, 7)
SWITCH = "ROUNDELAY_PEER_MEMORY"
DTYPES = ("float32", "float16", "int8", "complex128")
LAST = -1  # of the ways of a call: by reading others' memory, for those who may


def chosen(size: int) -> set[str]:
    """Return all algorithms by which ranks read, for any number of bytes."""
    return {name for names in default_for(size).reading.values() for name in names}


@pytest.mark.parametrize("size", range(2, 17))
def test_programs_are_proved_apart_and_in_place(size: int) -> None:
    for name in chosen(size):
        algorithm = algorithms.load(name)
        for root in range(size) if algorithm.collective.rooted else (0,):
            reads = compile_schedule(algorithm.schedule(size, root), READABLE)
            prove_program(reads, also_in_place=algorithm.collective.in_place)


@pytest.mark.parametrize("size", [*range(1, 20), 64])
def test_what_ranks_read_by_gives_the_bits_of_slots(size: int) -> None:
    for collective, names in default_for(size).reading.items():
        for name in names:
            assert algorithms.load(name).collective.name == collective
            assert tuning.keeps_every_bit(name, size)
            assert tuning.rounds_once(name, size)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have every collective read, from one byte on, by all algorithms that ranks read by."""

    def table(size: int) -> dict[str, tuple[str, ...]]:
        names = (
            *("all_gather_direct", "gather_direct", "scatter_direct", "all_to_all_direct"),
            *("reduce_scatter_direct", "all_reduce_two_shot", "reduce_two_shot"),
            "broadcast_two_shot" if size % 2 else "broadcast_direct",
        )
        return {algorithms.load(name).collective.name: (name,) for name in names}

    monkeypatch.setattr(tuning, "_reading", table)
    monkeypatch.setattr(tuning, "READING_FROM", 1)
    _core.force_way(LAST)
    yield
    _core.force_way(None)


def results(comm: Any) -> list[bytes]:
    """Return what every call gives, for counts that divide badly, and folds of several pieces."""
    found: list[Any] = []
    rng = np.random.default_rng(comm.rank)
    last = comm.size - 1
    for dtype in DTYPES:
        for count in (1, 7, 40_001 if dtype == "float32" else 501):
            x = (rng.standard_normal(count) * 9).astype(dtype)
            rows = np.stack([x + np.asarray(row).astype(dtype) for row in range(comm.size)])
            everything = [
                comm.all_reduce(x.copy()),
                comm.all_reduce(x, out=np.empty_like(x)),
                comm.all_reduce(x.copy(), "avg") if dtype != "int8" else None,
                comm.reduce(x.copy(), root=last),
                comm.reduce(x, out=np.empty_like(x)),
                comm.broadcast(x.copy(), root=last),
                comm.all_gather(x),
                comm.gather(x, root=last),
                comm.scatter(rows if comm.rank == last else None, root=last),
                comm.all_to_all(rows),
                comm.reduce_scatter(rows),
                comm.start.all_reduce(x.copy()).wait(),
                comm.all_to_all(rows[:, :1], axis=0),
                comm.all_gather(x[: comm.rank], axis=0, counts=list(range(comm.size)))
                if count > comm.size
                else None,
            ]
            found += [b"" if one is None else np.asarray(one).tobytes() for one in everything]
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("always")
def test_the_bits_are_those_of_slots(
    size: int, ranks: Any, processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ranks(size, results)
    monkeypatch.setenv(SWITCH, "0")
    assert read == processes(size, results)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("always")
def test_what_one_rank_may_not_none_does(size: int, processes: Any) -> None:
    def work(comm: Any, odd: int | None) -> tuple[bool, bool]:
        if comm.rank == odd:
            os.environ[SWITCH] = "0"  # this rank is a fork: no other sees it
        moved = comm.all_to_all(np.full((comm.size, 1000), comm.rank))
        return comm._engine.native.reads_peers, bool((moved[:, 0] == range(comm.size)).all())

    assert processes(size, partial(work, odd=size - 1)) == [(False, True)] * size
    assert processes(size, partial(work, odd=None)) == [(True, True)] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("always")
def test_memory_that_can_t_be_read_is_told_on_all_ranks(size: int, processes: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def work(comm: Any) -> str:
        comm.gather(np.ones(5000))  # all can read
        memory = mmap.mmap(-1, 40_000)
        x = np.frombuffer(memory, np.float64, 5000)
        if comm.rank == size - 1:
            address, length = ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(40_000)
            assert libc.mprotect(address, length, 0) == 0
        with pytest.raises(PeerLost) as caught:
            comm.gather(x)
            comm.barrier()
        return str(caught.value)

    for message in processes(size, work):
        assert f"the memory of rank {size - 1}" in message
        assert f"{SWITCH}=0" in message


@pytest.mark.usefixtures("always")
def test_a_fork_of_a_rank_is_not_taken_for_it(processes: Any) -> None:
    """What proves a process is not inherited: a child with its memory, and perhaps one day with its
    number, has none."""

    def work(comm: Any) -> bool:
        comm.all_to_all(np.full((comm.size, 1000), comm.rank))
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.write(writer, b"1" if _core.peer_proof() == (0, 0) else b"0")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return os.read(reader, 1) == b"1" and _core.peer_proof() != (0, 0)

    assert processes(3, work) == [True] * 3


PIECE, OFTEN = 2 << 20, 16  # bytes of a huge page, and reads after which an array gets them


def in_small_pages(count: int) -> Any:
    """Return float32 numbers in pages of the usual size, from the middle of a huge one on."""
    nbytes = 4 * count
    memory = np.frombuffer(mmap.mmap(-1, nbytes + 2 * PIECE, mmap.MAP_PRIVATE), np.uint8)
    start = -memory.ctypes.data % PIECE + PIECE // 2
    x = memory[start : start + nbytes].view(np.float32)
    x[:] = np.arange(count, dtype=np.float32)
    return x


def huge_bytes() -> int:
    """Return how much of this process lies in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("AnonHuge")))


def collapses() -> bool:
    """Tell whether the kernel makes huge pages of an array when it is asked to, and not before."""
    x = in_small_pages(PIECE)  # 8 MiB
    if huge_bytes() >= PIECE:
        return False
    address = ctypes.c_void_p(x.ctypes.data + PIECE // 2)
    return bool(ctypes.CDLL(None).madvise(address, ctypes.c_size_t(PIECE), 25) == 0)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.usefixtures("always")
def test_an_array_that_is_read_often_gets_huge_pages(size: int, processes: Any) -> None:
    """It stays where it is and as it is; pieces that it has not whole are left alone."""

    def work(comm: Any) -> tuple[bool, tuple[int, int], bool]:
        able = collapses()
        count = 3 * PIECE // 4
        x = in_small_pages(count)
        before, found = x.copy(), []
        for calls in range(2 * OFTEN):
            comm.barrier()  # so that nobody's result is made between two looks
            if calls in {0, OFTEN - 1, OFTEN}:
                found.append(huge_bytes())
            y = comm.gather(x)
            right = y is None or bool((y == before).all())
            del y
        return able, (found[1] - found[0], found[2] - found[1]), right and bool((x == before).all())

    for rank, (able, (early, then), same) in enumerate(processes(size, work)):
        assert same
        if able and rank != 0:  # whose results lie in huge pages, too
            # Of the first piece and the last one there is a half.
            assert (early, then) == (0, 2 * PIECE)
