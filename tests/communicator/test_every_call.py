"""Every engine, collective, reduction, dtype, count and size equals the reference bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.engines import run_schedule
from roundelay.reductions import REDUCTIONS, Located, fold
from roundelay.schedule import Schedule
from roundelay.tuning import DEFAULT

SIZES = (1, 2, 3, 4, 7)
COUNTS = (0, 1, 7, 1000)
LARGE = 300_007  # several slices, and no multiple of anything
DTYPES: list[Any] = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128"),
]
MOVING = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")


@dataclass
class Case:
    """One call on all ranks: what each brings and what is due."""

    collective: str
    op: str
    root: int
    algorithm: str | None
    inputs: list[Any]
    due: list[Any]

    def __str__(self) -> str:
        what = f"{self.collective} {self.op} {self.inputs[0].dtype}[{len(self.inputs[0])}]"
        return f"{what} root={self.root} algorithm={self.algorithm} size={len(self.inputs)}"


@cache
def pool(dtype: Any) -> Any:
    """Return so many numbers that large samples can be cut out of them, each at another place."""
    return drawn(np.random.default_rng(0), dtype, 4 * LARGE // 3)


def numbers(rng: np.random.Generator, dtype: Any, numel: int) -> Any:
    """Return numbers that no other rank or case has."""
    if numel < LARGE // 16:
        return drawn(rng, dtype, numel)
    whole = pool(dtype)
    start = rng.integers(len(whole) - numel)
    return whole[start : start + numel].copy()


def drawn(rng: np.random.Generator, dtype: Any, numel: int) -> Any:
    """Return numbers that round, wrap and compare in every way the dtype has."""
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
        made = rng.integers(low, high, numel, dtype=kind, endpoint=True)
        made[rng.random(numel) < 0.3] = 0
        return made
    if kind.kind == "b":
        return rng.random(numel) < 0.5
    made = rng.standard_normal(numel) * 9
    made[rng.random(numel) < 0.1] = 0.0
    made[rng.random(numel) < 0.1] = -0.0
    if kind.kind == "c":
        return (made + 1j * rng.standard_normal(numel)).astype(kind)
    made[rng.random(numel) < 0.05] = np.nan
    made[rng.random(numel) < 0.02] = np.inf
    return made.astype(kind)


def takes(op: str, dtype: Any, collective: str) -> bool:
    kind = "f" if dtype is ml_dtypes.bfloat16 else np.dtype(dtype).kind
    if op == "avg" and collective in ("scan", "exscan"):
        return False
    located = op in ("maxloc", "minloc")
    if located and (collective == "reduce_scatter" or dtype is ml_dtypes.bfloat16):
        return False
    return kind in REDUCTIONS[op].kinds


def numel_of(collective: str, size: int, count: int) -> int:
    return count * size if collective in ("scatter", "reduce_scatter", "all_to_all") else count


def make(
    rng: np.random.Generator,
    schedule: Schedule,
    dtype: Any,
    count: int,
    *,
    op: str = "sum",
    algorithm: str | None = None,
) -> Case:
    name = schedule.collective.name
    numel = numel_of(name, schedule.size, count)
    inputs = [numbers(rng, dtype, numel) for _ in range(schedule.size)]
    due = run_schedule(schedule, inputs, op=op)
    return Case(name, op, schedule.root, algorithm, inputs, due)


def call(comm: Any, case: Case) -> Any:
    """Make the call as a user would, on a fresh copy."""
    method = getattr(comm, case.collective)
    x = case.inputs[comm.rank].copy()
    options: dict[str, Any] = {"algorithm": case.algorithm}
    if case.collective in ("reduce", "broadcast", "gather", "scatter"):
        options["root"] = case.root
    if case.collective in REDUCING:
        options["op"] = case.op
    if case.collective in ("reduce_scatter", "all_to_all"):
        x = x.reshape(comm.size, -1)
    if case.collective == "scatter":
        x = x.reshape(comm.size, -1) if comm.rank == case.root else None
    return method(x, **options)


def wrong(comm: Any, cases: Sequence[Case]) -> list[str]:
    """Return the cases that this rank got wrong."""
    found = []
    for case in cases:
        got, due = call(comm, case), case.due[comm.rank]
        if case.collective == "exscan" and comm.rank == 0:
            due = case.inputs[0]
            if case.op.endswith("loc"):
                due = Located(due, np.zeros(due.shape, np.int64))
        if not same(got, due):
            found.append(f"{case}: got {got}, due {due}")
    return found


def same(got: Any, due: Any) -> bool:
    """Compare bit for bit; NaN is NaN, whatever its payload."""
    if due is None or got is None:
        return got is due
    if isinstance(due, Located):
        return same(got.values, due.values) and same(got.locations, due.locations)
    got = got.reshape(-1)
    if got.dtype != due.dtype or got.shape != due.shape:
        return False
    if due.dtype.kind == "c":
        got, due = got.view(got.real.dtype), due.view(due.real.dtype)
    nan = (got != got) & (due != due)  # noqa: PLR0124 - NaN
    width = f"u{due.dtype.itemsize}"
    return bool(np.all(nan | (got.view(width) == due.view(width))))


def judge(ranks: Any, size: int, cases: list[Case]) -> None:
    found = ranks(size, lambda comm: wrong(comm, cases))
    assert not [line for lines in found for line in lines]


@cache
def schedule_of(name: str, size: int, root: int = 0) -> Schedule:
    """Return the same schedule for the same question: thousands of cases share a few."""
    return algorithms.load(name).schedule(size, root)


REDUCED = [
    (collective, op, dtype, count)
    for collective, op, dtype, count in product(REDUCING, REDUCTIONS, DTYPES, COUNTS)
    if takes(op, dtype, collective)
]


@pytest.mark.parametrize("size", SIZES)
def test_every_reduction_dtype_and_count(
    size: int, threads: Any, processes: Any, sample: Any
) -> None:
    rng = np.random.default_rng(size)
    cases = []
    for collective, op, dtype, count in sample.cells(REDUCED, 4):
        name = DEFAULT.choose(collective, count * np.dtype(dtype).itemsize)
        schedule = schedule_of(name, size, (size - 1) * (count == 7))
        cases.append(make(rng, schedule, dtype, count, op=op))
    judge(threads, size, cases)
    judge(processes, size, cases)


@pytest.mark.parametrize("size", SIZES)
def test_every_root_dtype_and_count_of_what_only_moves(
    size: int, threads: Any, processes: Any, sample: Any
) -> None:
    rng = np.random.default_rng(size)
    grid = [
        (collective, root, dtype, count)
        for collective in MOVING
        for root in range(size if collectives.load(collective).rooted else 1)
        for dtype, count in product(DTYPES, COUNTS)
    ]
    cases = [
        make(rng, schedule_of(DEFAULT.choose(collective, 0), size, root), dtype, count)
        for collective, root, dtype, count in sample.cells(grid, 4)
    ]
    judge(threads, size, cases)
    judge(processes, size, cases)


def sized(size: int) -> Iterator[tuple[str, Schedule]]:
    """Yield every algorithm that moves data, for this size, with the last rank as root."""
    for name in algorithms.names():
        algorithm = algorithms.load(name)
        if algorithm.collective.name != "barrier":
            root = size - 1 if algorithm.collective.rooted else 0
            yield algorithm.short_name, schedule_of(name, size, root)


@pytest.mark.parametrize("size", SIZES)
def test_every_algorithm_by_name(size: int, threads: Any, processes: Any) -> None:
    rng = np.random.default_rng(size)
    cases = []
    for short, schedule in sized(size):
        for dtype in ("int32", "float32", "float16"):
            cases += [make(rng, schedule, dtype, n, algorithm=short) for n in COUNTS]
        if schedule.collective.reduces:
            for op in ("avg", "maxloc") if "scan" not in schedule.collective.name else ("min",):
                if takes(op, "float32", schedule.collective.name):
                    cases += [make(rng, schedule, "float32", 99, op=op, algorithm=short)]
    judge(threads, size, cases)
    judge(processes, size, cases)


@pytest.mark.parametrize("size", SIZES)
def test_every_algorithm_in_several_slices(size: int, threads: Any, processes: Any) -> None:
    rng = np.random.default_rng(size)

    def count(made: Schedule) -> int:
        return LARGE // max(1, made.collective.per_rank(size, made.root))

    cases = [make(rng, made, "float32", count(made), algorithm=n) for n, made in sized(size)]
    for collective in (*MOVING, *REDUCING):
        made = schedule_of(DEFAULT.choose(collective, 4 * LARGE), size)
        cases.append(make(rng, made, "float16", count(made)))
    judge(threads, size, cases)
    judge(processes, size, cases)


@pytest.mark.parametrize("size", SIZES)
def test_the_same_bits_on_every_rank_and_every_time(size: int, ranks: Any) -> None:
    """The promise for floats: one left fold in rank order, whatever the size and the slicing."""

    def bits(comm: Any) -> list[bytes]:
        rng = np.random.default_rng(comm.rank)
        x = rng.standard_normal(LARGE).astype(np.float32)
        whole = [comm.all_reduce(x.copy()).tobytes() for _ in range(3)]
        pieces = [comm.all_reduce(x[at : at + 5000].copy()) for at in range(0, LARGE, 5000)]
        return [*whole, np.concatenate(pieces).tobytes()]

    assert len({one for found in ranks(size, bits) for one in found}) == 1


@pytest.mark.parametrize("size", SIZES)
def test_barriers_part_before_from_after(size: int, ranks: Any) -> None:
    def work(comm: Any) -> list[float]:
        sums = []
        shared = comm.empty(1, np.int64)
        for turn, algorithm in enumerate([None, "tree", "dissemination"] * 5):
            shared[0] = turn
            comm.barrier(algorithm=algorithm)
            sums.append(comm.all_gather(shared)[:, 0].tolist() == [turn] * comm.size)
            comm.barrier()
        return sums

    assert all(all(found) for found in ranks(size, work))


def memory(comm: Any, there: int, given: Any) -> Any:
    """Return a copy, in the arena or not."""
    shared = comm.empty(given.shape, given.dtype)  # every rank must call it
    found = shared if there else np.empty_like(given)
    found[...] = given
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [7, 1000, 20_011])
def test_memory_in_the_arena_gives_the_same_bits(size: int, count: int, ranks: Any) -> None:
    """Whichever ranks have their buffers there: all of them, none, or every second one."""

    def work(comm: Any) -> None:
        rng = np.random.default_rng(comm.rank)
        whole = rng.standard_normal((comm.size, count)).astype(np.float32)
        every = comm.all_gather(whole)
        total = fold(REDUCTIONS["sum"], list(every))
        for places in ([True] * comm.size, [False] * comm.size, [rank % 2 for rank in range(size)]):
            for started in (False, True):
                calls = comm.start if started else comm
                x, out = (memory(comm, places[comm.rank], one) for one in (whole, whole[0] * 0))
                made = calls.reduce_scatter(x, out=out)
                assert (made.wait() if started else made) is out
                assert out.tobytes() == total[comm.rank].tobytes()
                assert x.tobytes() == whole.tobytes()
                out = memory(comm, places[comm.rank], whole * 0)
                made = calls.all_gather(x[0], out=out)
                assert (made.wait() if started else made) is out
                assert out.tobytes() == every[:, 0].tobytes()
                made = calls.all_reduce(x)
                assert (made.wait() if started else made) is x
                assert x.tobytes() == total.tobytes()

    ranks(size, work)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [7, 20_011])
def test_memory_in_the_arena_gives_the_same_bits_from_and_to_a_root(
    size: int, count: int, ranks: Any
) -> None:
    def work(comm: Any) -> None:
        def wait(made: Any) -> Any:
            return made.wait() if started else made

        rng = np.random.default_rng(comm.rank)
        whole = rng.standard_normal((comm.size, count)).astype(np.float32)
        every = comm.all_gather(whole)
        total = fold(REDUCTIONS["sum"], list(every))
        for there, started in product(([1] * size, [rank % 2 for rank in range(size)]), (0, 1)):
            calls, here = (comm.start if started else comm), there[comm.rank]
            for root in range(size):
                at_root = comm.rank == root
                x, row = memory(comm, here, whole), memory(comm, here, whole[0] * 0)
                out = memory(comm, here, whole * 0)
                wait(calls.all_to_all(x, out=out))
                assert out.tobytes() == every[:, comm.rank].tobytes()
                wait(calls.scatter(x if at_root else None, root, out=row))
                assert row.tobytes() == every[root, comm.rank].tobytes()
                wait(calls.gather(row, root, out=out if at_root else None))
                assert not at_root or out.tobytes() == every[root].tobytes()
                wait(calls.reduce(x, root=root, out=out if at_root else None))
                assert not at_root or out.tobytes() == total.tobytes()
                wait(calls.reduce(x, root=root, out=x if at_root else None))
                assert x.tobytes() == (total if at_root else whole).tobytes()
                wait(calls.broadcast(x, root))
                assert x.tobytes() == total.tobytes()

    ranks(size, work)
