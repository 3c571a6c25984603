"""What every collective call must give under MPI: grids against the reference engine."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from roundelay.algorithms import algorithms
from roundelay.engines import run_schedule
from roundelay.reductions import LOGICAL, REDUCTIONS, Located, Op, fold
from roundelay.schedule import Schedule
from roundelay.tuning import DEFAULT

COUNTS = (0, 1, 7, 1000)
SEED = os.environ.get("ROUNDELAY_SAMPLE")  # of the tests, where they run a sample
DTYPES: list[Any] = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128"),
]
MOVING = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")


def sample(rng: np.random.Generator, dtype: Any, numel: int, *, rounds: bool = False) -> Any:
    """Return numbers that wrap, compare and meet NaN; they add up exactly unless they round."""
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
        made = rng.integers(low, high, numel, dtype=kind, endpoint=True)
        made[rng.random(numel) < 0.3] = 0
        return made
    if kind.kind == "b":
        return rng.random(numel) < 0.5
    values = rng.standard_normal(numel) * 9 if rounds else rng.integers(-4, 5, numel) / 2
    if kind.kind == "c":
        return (values + 1j * rng.integers(-3, 4, numel)).astype(kind)
    values[rng.random(numel) < 0.1] = -0.0
    values[rng.random(numel) < 0.05] = np.nan
    values[rng.random(numel) < 0.02] = np.inf
    return values.astype(kind)


def takes(op: str, dtype: Any, collective: str) -> bool:
    kind = "f" if dtype is ml_dtypes.bfloat16 else np.dtype(dtype).kind
    if op == "avg" and collective in ("scan", "exscan"):
        return False
    if op.endswith("loc") and (collective == "reduce_scatter" or dtype is ml_dtypes.bfloat16):
        return False
    return kind in REDUCTIONS[op].kinds


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


def call(comm: Any, schedule: Schedule, x: Any, op: str, algorithm: str | None) -> Any:
    """Make the call as a user would, on a fresh copy."""
    name, x = schedule.collective.name, x.copy()
    options: dict[str, Any] = {"algorithm": algorithm}
    if schedule.collective.rooted:
        options["root"] = schedule.root
    if schedule.collective.reduces:
        options["op"] = op
    if name in ("reduce_scatter", "all_to_all"):
        x = x.reshape(comm.size, -1)
    if name == "scatter":
        x = x.reshape(comm.size, -1) if comm.rank == schedule.root else None
    return getattr(comm, name)(x, **options)


def by_definition(comm: Any, schedule: Schedule, inputs: list[Any], op: str) -> Any:
    """Return what this rank must get: folds from left to right, whole blocks where they go."""
    name, rank, size, root = schedule.collective.name, comm.rank, comm.size, schedule.root

    def folded(given: list[Any]) -> Any:
        if op.endswith("loc"):
            return run_schedule(schedule, inputs, op=op)[rank]
        result = fold(REDUCTIONS[op], given, divide_by=size if op == "avg" else None)
        return (result != 0).astype(result.dtype) if op in LOGICAL else result  # also of one

    def block(of: int, number: int) -> Any:
        return inputs[of].reshape(size, -1)[number]

    ranks = range(size)
    answers: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: folded(inputs),
        "reduce": lambda: folded(inputs) if rank == root else None,
        "reduce_scatter": lambda: folded([block(src, rank) for src in ranks]),
        "scan": lambda: folded(inputs[: rank + 1]),
        "exscan": lambda: folded(inputs[:rank]) if rank else inputs[0],
        "broadcast": lambda: inputs[root],
        "all_gather": lambda: np.concatenate(inputs),
        "gather": lambda: np.concatenate(inputs) if rank == root else None,
        "scatter": lambda: block(root, rank),
        "all_to_all": lambda: np.concatenate([block(src, rank) for src in ranks]),
    }
    return answers[name]()


def compare(
    comm: Any, schedule: Schedule, dtype: Any, count: int, *, op: str = "sum", by_name: str = ""
) -> Iterator[str]:
    """Yield what is wrong with one call."""
    name = schedule.collective.name
    rng = np.random.default_rng([count, schedule.root, len(op)])
    many = comm.size if name in ("scatter", "reduce_scatter", "all_to_all") else 1
    inputs = [sample(rng, dtype, count * many, rounds=bool(by_name)) for _ in range(comm.size)]
    got = call(comm, schedule, inputs[comm.rank], op, by_name or None)
    if name == "exscan" and comm.rank == 0:
        due = got if op.endswith("loc") else inputs[0]  # stays as it was
    elif by_name:
        due = run_schedule(schedule, inputs, op=op)[comm.rank]
    else:
        due = by_definition(comm, schedule, inputs, op)
    if not same(got, due):
        what = f"{name} {by_name} {op} {np.dtype(dtype)}[{count}] root={schedule.root}"
        yield f"{what}: got {got}, due {due}"


def visited(*cell: Any) -> bool:
    """Tell whether a cell of a large grid is visited, alike on all ranks; of a sample, one in 4."""
    return SEED is None or random.Random(f"{SEED} {cell}").random() < 1 / 4


def check_every_reduction_dtype_and_count(comm: Any) -> Iterator[str]:
    for collective in REDUCING:
        for count in COUNTS:
            name = DEFAULT.choose(collective, 0)
            schedule = algorithms.load(name).schedule(comm.size, (comm.size - 1) * (count == 7))
            for op in REDUCTIONS:
                for dtype in DTYPES:
                    if takes(op, dtype, collective) and visited(collective, count, op, dtype):
                        yield from compare(comm, schedule, dtype, count, op=op)


def check_every_root_and_dtype_of_what_only_moves(comm: Any) -> Iterator[str]:
    for collective in MOVING:
        algorithm = algorithms.load(DEFAULT.choose(collective, 0))
        for root in range(comm.size if algorithm.collective.rooted else 1):
            schedule = algorithm.schedule(comm.size, root)
            for dtype in DTYPES:
                for count in COUNTS:
                    if visited(collective, root, dtype, count):
                        yield from compare(comm, schedule, dtype, count)


def check_every_algorithm_by_name(comm: Any) -> Iterator[str]:
    for name in algorithms.names():
        algorithm = algorithms.load(name)
        if algorithm.collective.name != "barrier":
            root = comm.size - 1 if algorithm.collective.rooted else 0
            schedule = algorithm.schedule(comm.size, root)
            for dtype in ("float32", "float16"):
                for count in COUNTS:
                    yield from compare(comm, schedule, dtype, count, by_name=algorithm.short_name)
    for algorithm_name in ("tree", "dissemination"):
        comm.barrier(algorithm=algorithm_name)


def check_uneven_counts(comm: Any) -> Iterator[str]:
    size, rank = comm.size, comm.rank
    counts = [(3 * r + 2) % 5 for r in range(size)]
    mine = np.arange(counts[rank] * 2.0).reshape(-1, 2) + 100 * rank
    every = [np.arange(c * 2.0).reshape(-1, 2) + 100 * r for r, c in enumerate(counts)]
    whole = np.concatenate(every)
    if not np.array_equal(comm.all_gather(mine, axis=0, counts=counts), whole):
        yield "all_gather with counts"
    got = comm.gather(mine, size - 1, axis=0, counts=counts)
    if (got is None) != (rank != size - 1) or (got is not None and not np.array_equal(got, whole)):
        yield "gather with counts"
    total = np.tile(np.arange(float(sum(counts))), (2, 1)).T
    start = sum(counts[:rank])
    share = total[start : start + counts[rank]]
    for op, due in (("sum", share * size), ("avg", share), ("max", share)):
        if not np.array_equal(comm.reduce_scatter(total, op, axis=0, counts=counts), due):
            yield f"reduce_scatter {op} with counts"
    goes = [(rank + dst) % 3 for dst in range(size)]
    x = np.concatenate([np.full(n, rank * 10 + dst) for dst, n in enumerate(goes)])
    due = np.concatenate([np.full((src + rank) % 3, src * 10 + rank) for src in range(size)])
    if not np.array_equal(comm.all_to_all(x, axis=0, counts=goes), due):
        yield "all_to_all with counts"


def check_axis(comm: Any) -> Iterator[str]:
    rows = np.arange(comm.size * 4.0).reshape(comm.size * 2, 2)
    share = rows[2 * comm.rank : 2 * comm.rank + 2]
    if not np.array_equal(comm.all_gather(share, axis=0), rows):
        yield "all_gather axis=0"
    if not np.array_equal(comm.reduce_scatter(rows, axis=0), comm.size * share):
        yield "reduce_scatter axis=0"
    due = np.tile(share, (comm.size, 1))
    if not np.array_equal(comm.all_to_all(rows, axis=0), due):
        yield "all_to_all axis=0"


def check_where_results_go(comm: Any) -> Iterator[str]:
    size, rank, last = comm.size, comm.rank, comm.size - 1
    x, out = np.full(3, 1.0 + rank), np.zeros(3)
    total = size * (size + 1) / 2
    if comm.all_reduce(x, out=out) is not out or x[0] != 1 + rank or out[0] != total:
        yield "all_reduce out="
    if comm.all_reduce(x) is not x or x[0] != total:
        yield "all_reduce in place"
    x[:] = 1
    got = comm.reduce(x, root=last)
    if (got is x) != (rank == last) or x[0] != (size if rank == last else 1):
        yield "reduce in place at the root alone"
    wide = np.arange(20.0).reshape(4, 5)[:, ::2]
    if not np.array_equal(comm.all_reduce(wide), size * np.arange(20.0).reshape(4, 5)[:, ::2]):
        yield "memory with gaps"
    scalar = np.array(rank)
    if comm.broadcast(scalar, last) is not scalar or scalar != last:
        yield "an array without dimensions"
    frozen = np.ones(2)
    frozen.flags.writeable = False
    if comm.reduce(frozen, root=last, out=np.zeros(2)) is None and rank == last:
        yield "reduce of read-only memory"
    if rank == last:
        comm.broadcast(frozen, last)
    elif comm.broadcast(np.zeros(2), last)[1] != 1:
        yield "broadcast of read-only memory"


def check_own_reductions(comm: Any) -> Iterator[str]:
    def compose(f: Any, g: Any) -> Any:
        return f.real * g.real + 1j * (f.imag * g.real + g.imag)

    op = Op(compose, commutative=False)
    inputs = [np.full(2, 2 + rank + 1j * (rank + 1)) for rank in range(comm.size)]
    due, upto = inputs[0], inputs[0]
    for rank, other in enumerate(inputs[1:], 1):
        due = compose(due, other)
        upto = due if rank <= comm.rank else upto
    if not np.array_equal(comm.all_reduce(inputs[comm.rank].copy(), op), due):
        yield "all_reduce of your own"
    if not np.array_equal(comm.scan(inputs[comm.rank].copy(), op), upto):
        yield "scan of your own"


def check_places_of_the_largest(comm: Any) -> Iterator[str]:
    found = comm.all_reduce(np.array([float(comm.rank), -comm.rank, 5, np.nan]), "maxloc")
    if found.locations.tolist() != [comm.size - 1, 0, 0, 0]:
        yield f"maxloc {found}"
    far = Located(np.ones(2), np.array([1 << 40, 7 + comm.rank]))
    if comm.all_reduce(far, "minloc").locations.tolist() != [1 << 40, 7]:
        yield "places beyond 2^31"
