"""What `explain` shows is what every engine does: the same cuts, the same order, the same bytes.

The values cancel, so that a cut or an order of addition that is another one shows in the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay import _core
from roundelay.algorithms import Algorithm, algorithms
from roundelay.communicator import Communicator
from roundelay.engines import engines, run_schedule
from roundelay.schedule import Schedule, price, split

SIZES = (2, 3, 4, 5, 7)
COUNTS = (0, 1, 2, 3, 5, 7, 16, 17, 63, 65, 1000)
#: Of calls; the last two are large enough for ranks to look whether all buffers lie in the arena.
CALLED = (0, 1, 3, 17, 1000, 5_001, 9_001)
KINDS = (("sum", "float64"), ("avg", "float16"))
CANCELLING = {"float64": 1e16, "float16": 2048.0}


#: All but the one that they are compared with, and what joins others.
NO_GPU = pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="needs GPUs of NVIDIA")
OTHERS = [
    pytest.param(name, marks=NO_GPU if name == "nccl" else ())
    for name in engines.names()
    if name not in ("hierarchical", "reference")
]


def cancelling(dtype: str, count: int, rank: int) -> Any:
    """Return ones among values so large that a one beside them is lost."""
    large = CANCELLING[dtype]
    choices = np.array([1, large, -large, 1, 3, -large, large, 0.5], dtype)
    return choices[np.random.default_rng((count, rank)).integers(0, len(choices), count)]


def data_algorithms() -> list[str]:
    return [each.name for each in algorithms if each.collective.name != "barrier"]


def ops(algorithm: Algorithm) -> tuple[tuple[str, str], ...]:
    collective = algorithm.collective
    if not collective.reduces:
        return (("sum", "float64"),)
    scans = collective.name in ("scan", "exscan")
    return tuple((op, dtype) for op, dtype in KINDS if not (scans and op == "avg"))


def inputs_of(schedule: Schedule, counts: list[int], dtype: str) -> list[Any]:
    collective, size, root = schedule.collective, schedule.size, schedule.root
    found = []
    for rank in range(size):
        blocks = list(collective.before(size, root, rank))
        values = cancelling(dtype, sum(counts[block] for block in blocks), rank)
        found.append(values if blocks else None)
    return found


def lengths(blocks: int) -> list[list[int]]:
    """Return counts for the blocks: all alike, and each another."""
    uneven = [[COUNTS[(block * 3 + turn) % 9] for block in range(blocks)] for turn in range(3)]
    return [[count] * blocks for count in COUNTS] + (uneven if blocks > 1 else [])


@pytest.mark.parametrize("engine", OTHERS, indirect=True)
@pytest.mark.parametrize("name", data_algorithms())
def test_every_engine_gives_the_references_bits(engine: Any, name: str, sample: Any) -> None:
    algorithm = algorithms.load(name)
    grid = [
        (size, turn, kind)
        for size in SIZES
        for turn in range(len(lengths(algorithm.collective.blocks(size))))
        for kind in ops(algorithm)
    ]
    for size, turn, (op, dtype) in sample.cells(grid, 5):
        schedule = algorithm.schedule(size, size - 1 if algorithm.collective.rooted else 0)
        counts = lengths(algorithm.collective.blocks(size))[turn]
        inputs = inputs_of(schedule, counts, dtype)
        due = run_schedule(schedule, inputs, op=op, counts=counts)
        found = engine.run(schedule, inputs, op=op, counts=counts)
        assert list(map(bits, found)) == list(map(bits, due)), (size, counts, op, dtype)


def bits(array: Any) -> bytes | None:
    return None if array is None else array.tobytes()


def test_both_languages_make_the_same_cuts() -> None:
    for parts in range(1, 40):
        for count in range(200):
            runs = split(count, parts)
            cuts = [_core.cut(count, parts, part) for part in range(parts + 1)]
            assert cuts == [0, *(run.stop for run in runs)]


def call(comm: Communicator, algorithm: Algorithm, x: Any, count: int, *, root: int) -> Any:
    """Call a collective on this rank's buffer, whose blocks have `count` elements."""
    name = algorithm.collective.name
    options: dict[str, Any] = {"root": root} if algorithm.collective.rooted else {}
    if name in ("reduce_scatter", "all_to_all") or (name == "scatter" and comm.rank == root):
        x = x.reshape(comm.size, count)
    if name == "scatter":
        options["out"] = np.empty(count)
    if name == "broadcast" and x is None:
        x = np.empty(count)
    return getattr(comm, name)(x, algorithm=algorithm.short_name, **options)


def untruths(comm: Communicator) -> list[str]:
    """Compare results and traffic of all algorithms with the reference and the price."""
    wrong, size = [], comm.size
    arena = comm.empty(size * CALLED[-1])
    for name in data_algorithms():
        algorithm = algorithms.load(name)
        root = size - 1 if algorithm.collective.rooted else 0
        schedule = algorithm.schedule(size, root)
        blocks, most = algorithm.collective.blocks(size), schedule.collective.per_rank(size, root)
        for count, shared in [(n, n == CALLED[-1]) for n in CALLED]:
            inputs = inputs_of(schedule, [count] * blocks, "float64")
            due, x = run_schedule(schedule, inputs)[comm.rank], inputs[comm.rank]
            if shared:
                length = count if x is None else x.size
                arena[:length] = 0 if x is None else x
                x = arena[:length]
            before = comm.traffic()
            found = call(comm, algorithm, x, count, root=root)
            moved = [
                (now.sent - then.sent, now.received - then.received)
                for then, now in zip(before or [], comm.traffic() or [], strict=True)
            ]
            cost = price(schedule, most * count * 8, itemsize=8)
            if due is not None and bits(found) != bits(due):
                wrong.append(f"{name}, {count} elements: another result")
            if moved != list(zip(cost.sent, cost.received, strict=True)):
                wrong.append(f"{name}, {count} elements: moved {moved}, not {cost.sent}")
    return wrong


@pytest.mark.parametrize("engine_name", ["threads", "shared_memory"])
@pytest.mark.parametrize("size", SIZES)
def test_calls_fold_as_explained_and_move_what_was_predicted(engine_name: str, size: int) -> None:
    assert rd.run(untruths, size, engine_name) == [[]] * size
