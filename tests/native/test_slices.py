"""Messages of many slices: the slots change places and the next slice is fetched ahead, unseen."""

from __future__ import annotations

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
