"""Messages of many slices: the slots change places and the next slice is fetched ahead, unseen."""

from __future__ import annotations

import time

import numpy as np
import pytest

import roundelay as rd
from roundelay.communicator import Communicator

SLICE = 32 * 1024  # bytes of one slot of a two-shot all-reduce
ALGORITHMS = ("two_shot", "one_shot", "ring")
#: Below, at and above whole slices of a chunk, so that last slices are full, short or tiny.
SLICES = (1, 2, 3, 5)
EDGES = (-1, 0, 1, 17)


def wrong_results(comm: Communicator) -> list[str]:
    """Reduce messages of many lengths, one after the other, so that parities and places mix."""
    wrong = []
    for dtype in ("float32", "int8", "complex128"):
        item = np.dtype(dtype).itemsize
        for count in {comm.size * (SLICE // item) * n + edge for n in SLICES for edge in EDGES}:
            base = np.arange(count) % 5
            due = sum((base + rank).astype(dtype) for rank in range(comm.size))
            for algorithm in ALGORITHMS:
                x = (base + comm.rank).astype(dtype)
                comm.all_reduce(x, algorithm=f"all_reduce_{algorithm}")
                if not np.array_equal(x, due):
                    wrong.append(f"{algorithm}, {count} of {dtype}")
    return wrong


@pytest.mark.parametrize("engine", ["threads", "shared_memory"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_slice_arrives_whole(engine: str, size: int) -> None:
    assert rd.run(wrong_results, size, engine) == [[]] * size


def late_results(comm: Communicator) -> list[str]:
    """Mix messages of many slices with small ones, as ranks that are now ahead, now late.

    The root of small broadcasts runs ahead as far as it may, while others still read what it showed
    for the slices before.
    """
    wrong, dice = [], np.random.default_rng(7 + comm.rank)
    for turn in range(40):
        root, count = turn % comm.size, (turn % 4 + 1) * comm.size * SLICE // 3 + turn
        base = np.arange(count, dtype=np.float32) % 11
        due = sum(base + rank for rank in range(comm.size))
        if dice.random() < 0.3:
            time.sleep(dice.random() / 500)
        for algorithm in ("two_shot", "direct"):
            x = base + np.float32(comm.rank)
            found = comm.reduce(x, root=root, algorithm=f"reduce_{algorithm}")
            if found is not None and not np.array_equal(found, due):
                wrong.append(f"{turn}: reduce {algorithm} of {count}")
        for ahead in range(35):
            small = np.full(3, turn * 100 + ahead if comm.rank == root else -1)
            if not (comm.broadcast(small, root=root) == turn * 100 + ahead).all():
                wrong.append(f"{turn}: broadcast {ahead}")
        if dice.random() < 0.3:
            time.sleep(dice.random() / 500)
        x = base + np.float32(comm.rank)
        if not np.array_equal(comm.all_reduce(x), due):
            wrong.append(f"{turn}: all_reduce of {count}")
    return wrong


@pytest.mark.parametrize("engine", ["threads", "shared_memory"])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_slices_arrive_whole_whoever_is_late(engine: str, size: int) -> None:
    assert rd.run(late_results, size, engine) == [[]] * size
