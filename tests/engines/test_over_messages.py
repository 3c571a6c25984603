"""Jobs over messages give what the reference engine gives, to the last bit, for every algorithm."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from roundelay import _core
from roundelay.algorithms import algorithms
from roundelay.engines import CollectiveCall, run_schedule
from roundelay.engines._over_messages import OverMessages
from roundelay.reductions import REDUCTIONS, Array, Located
from roundelay.schedule import Schedule

SIZES = (1, 2, 3, 5)
DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
]


#: What is on its way from one rank to another, and what tells that it has come.
Line = queue.Queue[tuple[Array, threading.Event]]


class Post:
    """Messages between threads: one queue for each ordered pair of ranks.

    As those of a network they are read, and written, at any time until they are done.
    """

    def __init__(self, rank: int, queues: dict[tuple[int, int], Line]) -> None:
        self.rank, self.queues = rank, queues

    def __call__(self, data: Array, other: int, *, sends: bool) -> Posted:
        assert data.dtype == np.uint8
        assert other != self.rank
        came = threading.Event()
        if sends:
            self.queues[self.rank, other].put((data, came))
        else:
            data[:] = 0xAA  # nobody may count on what was there
        return Posted(None if sends else data, self.queues[other, self.rank], came)


class Posted:
    def __init__(self, data: Array | None, line: Line, came: threading.Event) -> None:
        self.data, self.line, self.came = data, line, came

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        if self.data is None:
            assert self.came.wait(30)
        else:
            sent, came = self.line.get(timeout=30)
            self.data[:] = sent
            came.set()


def run(build: list[CollectiveCall], schedule: Schedule) -> None:
    queues: dict[tuple[int, int], Line] = defaultdict(queue.Queue)
    for src in range(schedule.size):
        for dst in range(schedule.size):
            queues[src, dst]
    failures: list[BaseException] = []

    def be_rank(rank: int) -> None:
        try:
            OverMessages(rank, Post(rank, queues)).run(build[rank], schedule)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=be_rank, args=(rank,)) for rank in range(schedule.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failures:
        raise error
    assert all(line.empty() for line in queues.values())


def in_memory(array: Any) -> Array:
    """As jobs hold it: bfloat16 is uint16, a pair is a record."""
    if isinstance(array, Located):
        kind = [("value", array.values.dtype), ("location", np.int64)]
        packed = np.empty(array.values.shape, kind)
        packed["value"], packed["location"] = array
        return packed
    made: Array = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
    return made


def check(schedule: Schedule, dtype: str, op: str, count: int) -> None:
    kind, size, root = schedule.collective, schedule.size, schedule.root
    rng = np.random.default_rng(count)
    inputs: list[Any] = []
    for rank in range(size):
        numel = count * len(list(kind.before(size, root, rank)))
        if dtype == "bfloat16":
            ml_dtypes = pytest.importorskip("ml_dtypes")
            values: Any = rng.integers(-4, 5, numel).astype(ml_dtypes.bfloat16)
        else:
            values = (rng.integers(0, 5, numel) / 3).astype(dtype)
        if op.endswith("loc"):
            values = Located(values, np.full(numel, rank))
        inputs.append(values if numel or list(kind.before(size, root, rank)) else None)
    due = run_schedule(schedule, inputs, op=op)
    build = []
    for given, expected in zip(inputs, due, strict=True):
        data = None if given is None else in_memory(given).copy()
        output = None if expected is None else np.zeros_like(in_memory(expected))
        build.append(
            CollectiveCall(kind.name, dtype, 0, count, 0, lambda: None, data, output, op, root)
        )
    run(build, schedule)
    for given, expected, call in zip(inputs, due, build, strict=True):
        if expected is not None:
            assert call.output is not None
            assert call.output.tobytes() == in_memory(expected).tobytes()
        if given is not None:
            assert call.input is not None
            assert call.input.tobytes() == in_memory(given).tobytes()


def moving() -> list[str]:
    return [n for n in algorithms.names() if algorithms.load(n).collective.name != "barrier"]


@pytest.mark.parametrize("name", moving())
def test_every_algorithm_gives_what_the_reference_gives(name: str) -> None:
    for size in SIZES:
        for root in range(size if algorithms.load(name).collective.rooted else 1):
            for count in (0, 1, 7, 100):
                check(algorithms.load(name).schedule(size, root), "float32", "sum", count)


@pytest.mark.parametrize("op", REDUCTIONS)
def test_every_reduction_and_dtype(op: str) -> None:
    for name in ("all_reduce_one_shot", "all_reduce_ring", "reduce_scatter_ring"):
        schedule = algorithms.load(name).schedule(3)
        for dtype in DTYPES:
            if _core.supports(op, dtype):
                check(schedule, dtype, op, 5)


@pytest.mark.parametrize("name", ["barrier_tree", "barrier_dissemination"])
def test_a_barrier_hears_of_every_rank(name: str) -> None:
    """Nobody returns before everybody has come."""
    schedule = algorithms.load(name).schedule(4)
    queues: dict[tuple[int, int], Line] = defaultdict(queue.Queue)
    for src in range(4):
        for dst in range(4):
            queues[src, dst]
    nothing = np.empty(0, np.uint8)
    left: list[int] = []

    def be_rank(rank: int) -> None:
        call = CollectiveCall("barrier", "uint8", 1, 0, 0, lambda: None, nothing, nothing, "max")
        OverMessages(rank, Post(rank, queues)).run(call, schedule)
        left.append(rank)

    threads = [threading.Thread(target=be_rank, args=(rank,)) for rank in range(4)]
    for thread in threads[:3]:
        thread.start()
    threads[0].join(timeout=0.3)
    assert left == []
    threads[3].start()
    for thread in threads:
        thread.join()
    assert sorted(left) == [0, 1, 2, 3]


IN_PLACE = ("all_reduce", "reduce", "scan")


@pytest.mark.parametrize(
    "name", [n for n in moving() if algorithms.load(n).collective.name in IN_PLACE]
)
def test_an_output_in_the_place_of_the_input(name: str) -> None:
    """Nothing is written where somebody still reads, whatever the order of the messages."""
    for size in SIZES:
        schedule = algorithms.load(name).schedule(size)
        kind = schedule.collective.name
        for count in (0, 1, 7, 100):
            inputs = [np.arange(float(count)) * 3**rank for rank in range(size)]
            due = run_schedule(schedule, inputs)
            data = [each.copy() for each in inputs]
            outputs = [x if y is not None else None for x, y in zip(data, due, strict=True)]
            run([
                CollectiveCall(kind, "float64", 8, count, 8 * count, lambda: None, x, output)
                for x, output in zip(data, outputs, strict=True)
            ], schedule)  # fmt: skip
            for given, found, expected in zip(inputs, data, due, strict=True):
                np.testing.assert_array_equal(found, given if expected is None else expected)
