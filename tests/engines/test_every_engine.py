"""Every engine, algorithm, size, reduction, dtype and count gives what the contract says.

The oracle below knows nothing of schedules: it computes each collective straight from its
definition, folding in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from roundelay.algorithms import Algorithm, algorithms
from roundelay.collectives import collectives
from roundelay.errors import InvalidArgumentError, UnsupportedReductionError
from roundelay.reductions import REDUCTIONS, Located, Op
from roundelay.schedule import prove

SIZES = (1, 2, 3, 4, 7)
COUNTS = (0, 1, 7, 1000)
DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
LOGICAL = ("land", "lor", "lxor")
PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a | b if a.dtype == bool else a + b,
    "prod": lambda a, b: a * b,
    "min": np.minimum,
    "max": np.maximum,
    "avg": lambda a, b: a + b,
    "land": lambda a, b: (a.astype(bool) & b.astype(bool)).astype(a.dtype),
    "lor": lambda a, b: (a.astype(bool) | b.astype(bool)).astype(a.dtype),
    "lxor": lambda a, b: (a.astype(bool) ^ b.astype(bool)).astype(a.dtype),
    "band": lambda a, b: a & b,
    "bor": lambda a, b: a | b,
    "bxor": lambda a, b: a ^ b,
}


def folded(op: str, arrays: Sequence[Any], size: int) -> Any:
    """Fold in rank order; halves in float32, rounded once."""
    wide = [a.astype(np.float32) if a.dtype == np.float16 else a for a in arrays]
    result = wide[0].astype(bool).astype(wide[0].dtype) if op in LOGICAL else wide[0]
    for other in wide[1:]:
        result = PYTHON[op](result, other)
    if op == "avg" and np.iscomplexobj(result):
        result = result.real / result.real.dtype.type(size) + 1j * (
            result.imag / result.imag.dtype.type(size)
        )
    elif op == "avg":
        result = result / result.dtype.type(size)
    return result.astype(arrays[0].dtype)


def oracle(name: str, inputs: list[Any], root: int, op: str) -> list[Any]:
    size = len(inputs)

    def blocks(rank: int) -> list[Any]:
        length = len(inputs[rank]) // size
        return [inputs[rank][length * block :][:length] for block in range(size)]

    def total(upto: int = size) -> Any:
        return folded(op, inputs[:upto], size)

    def everything() -> Any:
        return np.concatenate(inputs)

    def at_root(make: Callable[[], Any]) -> list[Any]:
        return [make() if rank == root else None for rank in range(size)]

    ranks = range(size)
    answers: dict[str, Callable[[], list[Any]]] = {
        "all_reduce": lambda: [total() for _ in ranks],
        "reduce": lambda: at_root(total),
        "broadcast": lambda: [inputs[root] for _ in ranks],
        "scatter": lambda: blocks(root),
        "gather": lambda: at_root(everything),
        "all_gather": lambda: [everything() for _ in ranks],
        "reduce_scatter": lambda: [
            folded(op, [blocks(src)[rank] for src in ranks], size) for rank in ranks
        ],
        "all_to_all": lambda: [
            np.concatenate([blocks(src)[rank] for src in ranks]) for rank in ranks
        ],
        "scan": lambda: [total(rank + 1) for rank in ranks],
        "exscan": lambda: [total(rank) if rank else None for rank in ranks],
    }
    return answers[name]()


def numbers(dtype: str, numel: int, rank: int) -> Any:
    """Return small whole numbers, exact in every dtype in every order, zeros among them."""
    values = (np.arange(numel) * 7 + rank * 3) % 4
    if dtype.startswith("complex"):
        return (values + 1j * ((values + rank) % 3)).astype(dtype)
    return values.astype(dtype)


def numel_of(algorithm: Algorithm, size: int, count: int) -> int:
    return count * len(list(algorithm.collective.before(size, 0, 0)))


def data_algorithms() -> list[str]:
    return [
        name for name in algorithms.names() if algorithms.load(name).collective.name != "barrier"
    ]


def same(found: Any, due: Any) -> None:
    if due is None:
        assert found is None
        return
    assert found.dtype == due.dtype
    if not np.array_equal(found, due):  # which is quicker than to say what differs
        np.testing.assert_array_equal(found, due)


@pytest.mark.parametrize("name", data_algorithms())
def test_every_count_and_root(engine: Any, name: str, sample: Any) -> None:
    algorithm = algorithms.load(name)
    collective = algorithm.collective
    grid = [
        (size, root, count)
        for size in SIZES
        for root in range(size if collective.rooted else 1)
        for count in COUNTS
    ]
    for size, root, count in sample.cells(grid, 4):
        numel = size * count if collective.name == "scatter" else numel_of(algorithm, size, count)
        inputs = [numbers("int64", numel, rank) for rank in range(size)]
        found = engine.run(algorithm.schedule(size, root), inputs)
        for got, due in zip(found, oracle(collective.name, inputs, root, "sum"), strict=True):
            same(got, due)


REDUCING = [n for n in data_algorithms() if algorithms.load(n).collective.reduces]


def reductions(name: str, size: int) -> list[tuple[str, str]]:
    """Return all reductions and dtypes for one algorithm of each collective, a fifth for others.

    Sizes and algorithms have different fifths, so that each algorithm meets all in the end.
    """
    every = list(product(PYTHON, DTYPES))
    kin = [n for n in REDUCING if algorithms.load(n).collective == algorithms.load(name).collective]
    return every if name == kin[0] else every[(kin.index(name) + SIZES.index(size)) % 5 :: 5]


@pytest.mark.parametrize("name", REDUCING)
def test_every_reduction_and_dtype(engine: Any, name: str, sample: Any) -> None:
    algorithm = algorithms.load(name)
    scans = algorithm.collective.name in ("scan", "exscan")
    grid = [(size, op, dtype) for size in SIZES for op, dtype in reductions(name, size)]
    for size, op, dtype in sample.cells(grid, 4):
        schedule = algorithm.schedule(size)
        inputs = [numbers(dtype, numel_of(algorithm, size, 3), rank) for rank in range(size)]
        if np.dtype(dtype).kind not in REDUCTIONS[op].kinds or (op == "avg" and scans):
            with pytest.raises(UnsupportedReductionError, match=op):
                engine.run(schedule, inputs, op=op)
            continue
        found = engine.run(schedule, inputs, op=op)
        for got, due in zip(found, oracle(algorithm.collective.name, inputs, 0, op), strict=True):
            same(got, due)


def test_every_algorithm_meets_every_reduction_and_dtype() -> None:
    for name in REDUCING:
        met = {pair for size in SIZES for pair in reductions(name, size)}
        assert met == set(product(PYTHON, DTYPES))


@pytest.mark.parametrize("name", REDUCING)
def test_located_reductions_keep_the_lowest_place(engine: Any, name: str) -> None:
    algorithm = algorithms.load(name)
    for size in SIZES:
        schedule = algorithm.schedule(size)
        numel = numel_of(algorithm, size, 4)
        values = [numbers("float64", numel, rank) for rank in range(size)]
        for op, best in (("maxloc", np.max), ("minloc", np.min)):
            found = engine.run(schedule, values, op=op)
            stacked = np.stack(values)
            for rank, got in enumerate(found):
                if got is None:
                    continue
                name = algorithm.collective.name
                upto = {"scan": rank + 1, "exscan": rank}.get(name, size)
                mine = slice(4 * rank, 4 * rank + 4) if name == "reduce_scatter" else slice(None)
                seen = stacked[:upto, mine]
                np.testing.assert_array_equal(got.values, best(seen, axis=0))
                np.testing.assert_array_equal(got.locations, (seen == got.values).argmax(axis=0))


@pytest.mark.parametrize("name", REDUCING)
def test_floats_are_added_in_the_proved_order(engine: Any, name: str) -> None:
    """Where the proof says rank_order in one fold, the result is the left fold, bit for bit."""
    algorithm = algorithms.load(name)
    rng = np.random.default_rng(0)
    for size in SIZES:
        schedule = algorithm.schedule(size)
        proof = prove(schedule)
        if proof.order != "rank_order" or proof.folds > 1:
            continue
        for dtype in ("float16", "float32", "float64"):
            numel = numel_of(algorithm, size, 33)
            inputs = [(rng.standard_normal(numel) * 9).astype(dtype) for _ in range(size)]
            for got, due in zip(
                engine.run(schedule, inputs),
                oracle(algorithm.collective.name, inputs, 0, "sum"),
                strict=True,
            ):
                same(got, due)


@pytest.mark.parametrize("name", REDUCING)
def test_non_commutative_reductions_run_in_order_or_are_refused(engine: Any, name: str) -> None:
    """Composition of x -> a x + b is associative, not commutative: a pair packed in a complex."""
    algorithm = algorithms.load(name)
    compose = Op(lambda f, g: f.real * g.real + 1j * (f.imag * g.real + g.imag), commutative=False)
    for size in SIZES:
        schedule = algorithm.schedule(size)
        numel = numel_of(algorithm, size, 1)
        inputs = [np.full(numel, 2 + rank + 1j * (rank + 1)) for rank in range(size)]
        if prove(schedule).order == "any":
            with pytest.raises(UnsupportedReductionError, match="not commutative"):
                engine.run(schedule, inputs, op=compose)
            continue
        for rank, got in enumerate(engine.run(schedule, inputs, op=compose)):
            if got is None:
                continue
            upto = {"scan": rank + 1, "exscan": rank}.get(algorithm.collective.name, size)
            due = inputs[0][0]
            for other in inputs[1:upto]:
                due = compose.reduction.fold(np.array([due]), other[:1])[0]
            np.testing.assert_array_equal(got, np.full(got.shape, due))


def test_uneven_blocks(engine: Any) -> None:
    for name in ("all_gather_ring", "gather_binomial"):
        schedule = algorithms.load(name).schedule(3)
        inputs = [np.arange(n) + 10 * n for n in (3, 0, 2)]
        found = engine.run(schedule, inputs)
        same(found[0], np.concatenate(inputs))
    schedule = algorithms.load("reduce_scatter_ring").schedule(4)
    found = engine.run(schedule, [np.full(2, v) for v in (1, 2, 3, 4)], counts=[1, 1, 0, 0])
    assert [list(part) for part in found] == [[10], [10], [], []]


def test_nan_wins_and_the_first_of_equals_stays(engine: Any) -> None:
    schedule = algorithms.load("all_reduce_two_shot").schedule(3)
    inputs = [np.array([0.0, np.nan, 1.0]), np.array([-0.0, 2.0, np.nan]), np.array([0.0, 3, 0])]
    for op in ("min", "max"):
        found = engine.run(schedule, inputs, op=op)[2]
        assert not np.signbit(found[0])
        assert np.isnan(found[1:]).all()
    place = engine.run(schedule, inputs, op="maxloc")[0]
    assert list(place.locations) == [0, 0, 1]


def test_barriers_carry_nothing(engine: Any) -> None:
    for name in ("barrier_tree", "barrier_dissemination"):
        found = engine.run(algorithms.load(name).schedule(5), [None] * 5)
        assert [len(part) for part in found] == [0] * 5


ring = algorithms.load("all_reduce_ring")


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([np.zeros(2)] * 3, {}, "4 inputs, not 3"),
        ([np.zeros(2)] * 3 + [None], {}, "rank 3 brings no input"),
        ([np.zeros(2)] * 3 + [np.zeros(3)], {}, "rank 3 has 3 elements .* where rank 0 has 2"),
        ([np.zeros(2)] * 3 + [np.zeros(2, int)], {}, "one dtype on every rank"),
        ([np.zeros(2)] * 4, {"op": "summ"}, "Did you mean 'sum'"),
        ([np.zeros(2)] * 4, {"op": "mean"}, "Did you mean 'avg'"),
        ([np.zeros(2)] * 4, {"counts": [3]}, "rank 0 has 2 elements, but counts"),
        ([np.zeros(2)] * 4, {"counts": [1, 1]}, "counts= of 1 whole numbers"),
        ([np.zeros(2)] * 4, {"counts": [-2]}, "counts= of 1 whole numbers"),
        ([np.zeros(2)] * 4, {"op": "band"}, "band takes bool, .* not float64"),
        ([np.array(["x"])] * 4, {}, "does not take dtype <U1"),
        ([Located(np.zeros(1), np.zeros(1))] * 4, {}, "Located is for maxloc"),
        ([np.zeros(2)] * 4, {"op": Op(np.append)}, "must keep shape and dtype"),
        ([np.zeros(2)] * 4, {"op": Op(lambda a, b: a > b)}, "must keep shape and dtype"),
    ],
)
def test_bad_input_is_named(engine: Any, inputs: Any, options: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        engine.run(ring.schedule(4), inputs, **options)


def test_op_needs_a_function() -> None:
    with pytest.raises(InvalidArgumentError, match="function of two arrays"):
        Op(3)  # type: ignore[arg-type]


def test_every_collective_is_covered_by_the_oracle() -> None:
    for name in collectives.names():
        if name != "barrier":
            assert oracle(name, [np.zeros(2), np.zeros(2)], 0, "sum")
