"""Laws of `rd.jax`, each a function of one rank that says what does not hold.

Run as a program, apart from pytest: JAX has threads, and a process that has begun it should not be
forked. `python laws.py ENGINE SIZES LAW…` prints what does not hold, as JSON. A law `gradients`
may be followed by the cells of its grid: `gradients:all_reduce-max,scan-sum`.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import roundelay as rd
from roundelay.errors import UnsupportedReductionError
from roundelay.reductions import CODES, LOGICAL, REDUCTIONS, fold

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
MOVING = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
ROWS = ("reduce_scatter", "scatter", "all_to_all")
OPS = [name for name in REDUCTIONS if name not in ("maxloc", "minloc")]
DIFFERENTIABLE = ("sum", "avg", "prod", "min", "max")
ROOT = -1  # the last rank


def shape_of(name: str, size: int) -> tuple[int, ...]:
    return (size, 2, 3) if name in ROWS else (2, 3)


def drawn(name: str, dtype: str, size: int) -> list[Any]:
    """Draw what every rank brings: small whole numbers, so that ties are many."""
    numbers = np.random.default_rng(len(name)).integers(0, 4, (size, *shape_of(name, size)))
    kind = jnp.dtype(dtype)
    return [row.astype(kind) for row in numbers]


def call(name: str, x: Any, comm: rd.Communicator, op: str = "sum") -> Any:
    options: dict[str, Any] = {"op": op} if name in REDUCING else {}
    if name in ("reduce", "broadcast", "gather", "scatter"):
        options["root"] = comm.size + ROOT
    return getattr(rd.jax, name)(x, comm=comm, **options)


def zeros(like: Any) -> Any:
    return like * 0 if isinstance(like, jax.Array) else np.zeros_like(like)


def expected(  # noqa: PLR0911 - a definition each
    name: str, xs: Any, rank: int, folds: Callable[[Any], Any], neutral: Any
) -> Any:
    """Say by definition what a rank gets; of numpy's arrays, or of JAX's on one device."""
    size, root = len(xs), len(xs) + ROOT
    if name == "all_reduce":
        return folds(xs)
    if name == "reduce":
        return folds(xs) if rank == root else zeros(xs[0])
    if name == "scan":
        return folds(xs[: rank + 1])
    if name == "exscan":
        return folds(xs[:rank]) if rank else neutral
    if name == "reduce_scatter":
        return folds([x[rank] for x in xs])
    if name == "broadcast":
        return xs[root]
    if name == "scatter":
        return xs[root][rank]
    stack = jnp.stack if isinstance(xs[0], jax.Array) else np.stack
    if name == "all_to_all":
        return stack([x[rank] for x in xs])
    stacked = stack([xs[each] for each in range(size)])
    return stacked if name == "all_gather" or rank == root else zeros(stacked)


def numpy_fold(op: str, xs: Any) -> Any:
    folded = fold(REDUCTIONS[op], list(xs), divide_by=len(xs) if op == "avg" else None)
    return (folded != 0).astype(folded.dtype) if op in LOGICAL else folded  # also of one


def is_neutral(op: str, value: Any) -> bool:
    """Tell whether what rank 0 gets of an exscan changes no value, the extreme ones among them."""
    kind = value.dtype
    values: list[Any]
    if jnp.issubdtype(kind, jnp.integer):
        values = [jnp.iinfo(kind).min, jnp.iinfo(kind).max, 0, 1, 2, 3]
    else:
        values = [0, 1] if kind == np.bool_ else [-np.inf, np.inf, 0, 1, 2, -3]
        values = [0, 1, 2, -3] if jnp.issubdtype(kind, jnp.complexfloating) else values
    for number in values:
        given = np.full(value.shape, number, kind)
        whole = given.astype(bool).astype(kind) if op in LOGICAL else given
        if not np.array_equal(numpy_fold(op, [value, given]), whole):
            return False
    return True


def same(found: Any, wanted: Any, *, close: bool = False) -> bool:
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if close:
        return bool(np.allclose(found, wanted, rtol=1e-10, atol=1e-10))
    return found.tobytes() == wanted.tobytes()


def cells(name: str) -> Iterator[tuple[str, str]]:
    for dtype in CODES:
        for op in OPS if name in REDUCING else ["sum"]:
            try:
                if name in REDUCING:
                    REDUCTIONS[op].check(dtype)
            except UnsupportedReductionError:
                continue
            if op != "avg" or name not in ("scan", "exscan"):
                yield op, dtype


def values(comm: rd.Communicator) -> Iterator[str]:
    """Every collective, op and dtype in one compiled program has the bits of the definition."""
    for name in (*REDUCING, *MOVING):
        every = list(cells(name))
        xs = [drawn(name, dtype, comm.size) for _, dtype in every]

        @jax.jit
        def program(given: list[Any], name: str = name, every: Any = every) -> list[Any]:
            pairs = zip(given, every, strict=True)
            return [call(name, x, comm, op) for x, (op, _) in pairs]

        found = program([jnp.asarray(brought[comm.rank]) for brought in xs])
        for (op, dtype), brought, result in zip(every, xs, found, strict=True):
            first = (name, comm.rank) == ("exscan", 0)
            wanted = expected(name, brought, comm.rank, partial(numpy_fold, op), brought[0])
            if not (is_neutral(op, np.asarray(result)) if first else same(result, wanted)):
                yield f"{name} {op} {dtype}: {np.asarray(result).tolist()}, not {wanted.tolist()}"


def eager(comm: rd.Communicator) -> Iterator[str]:
    """Outside of programs, and with axis=0, it is the same."""
    for name in (*REDUCING, *MOVING):
        brought = drawn(name, "float32", comm.size)
        wanted = expected(name, brought, comm.rank, partial(numpy_fold, "sum"), brought[0] * 0)
        if not same(call(name, jnp.asarray(brought[comm.rank]), comm), wanted):
            yield name
    x = jnp.arange(4 * comm.size).reshape(2 * comm.size, 2) + comm.rank
    total = comm.size * x + comm.size * (comm.size - 1) // 2 - comm.size * comm.rank
    mine = total[2 * comm.rank : 2 * comm.rank + 2]
    if not same(rd.jax.reduce_scatter(x, axis=0, comm=comm), mine):
        yield "reduce_scatter, axis=0"
    back = rd.jax.all_to_all(rd.jax.all_to_all(x, axis=0, comm=comm), axis=0, comm=comm)
    if not same(back, x):
        yield "all_to_all, axis=0, there and back"
    if not same(rd.jax.all_gather(x[:1], axis=0, comm=comm)[comm.rank], x[0]):
        yield "all_gather, axis=0"
    rd.jax.barrier(comm=comm)


def control(comm: rd.Communicator) -> Iterator[str]:
    """Loops, branches, batches and recomputation give what the plain program gives."""
    size, last = comm.size, comm.size + ROOT
    x = jnp.arange(6.0).reshape(2, 3) + comm.rank
    total = size * jnp.arange(6.0).reshape(2, 3) + size * (size - 1) / 2
    reduce = partial(rd.jax.all_reduce, comm=comm)

    def step(carry: Any, _: Any) -> Any:
        return reduce(carry) / size, rd.jax.broadcast(carry, last, comm=comm)

    at_last = jnp.arange(6.0).reshape(2, 3) + last
    ways: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "scan": (lambda x: jax.lax.scan(step, x, None, length=3)[0], total / size),
        "scan's outputs": (lambda x: jax.lax.scan(step, x, None, length=1)[1][0], at_last),
        "fori_loop": (lambda x: jax.lax.fori_loop(0, 2, lambda _, v: reduce(v), x), total * size),
        "while_loop": (
            lambda x: jax.lax.while_loop(
                lambda v: reduce(v[0, 0]) < 100, lambda v: v * 2 + 1, x * 0
            ),
            jnp.full((2, 3), next(v for v in (2.0**n - 1 for n in range(9)) if v * size >= 100)),
        ),
        "cond": (lambda x: jax.lax.cond(x[0, 0] >= 0, reduce, lambda v: v, x), total),
        "switch": (lambda x: jax.lax.switch(1, [lambda v: v, reduce], x), total),
        "checkpoint": (jax.checkpoint(reduce), total),
        "vmap": (jax.vmap(reduce), total),
        "vmap of the last axis": (jax.vmap(reduce, in_axes=1, out_axes=1), total),
        "vmap of scan": (
            jax.vmap(lambda x: jax.lax.scan(step, x, None, length=2)[0]), total / size,
        ),
        "two vmaps": (jax.vmap(jax.vmap(reduce)), total),
        "nested jit": (jax.jit(reduce), total),
    }  # fmt: skip
    for way, (program, wanted) in ways.items():
        for how, run in (("", program), ("compiled ", jax.jit(program))):
            if not same(run(x), wanted, close=True):
                yield f"{how}{way}"


def batches(comm: rd.Communicator) -> Iterator[str]:
    """Every collective under vmap is the same as one call for each of the batch."""
    for name in (*REDUCING, *MOVING):
        one = drawn(name, "float64", comm.size)[comm.rank]
        for axis in range(one.ndim + 1):
            batch = np.stack([one, 2 * one + 1], axis)
            found = jax.jit(jax.vmap(lambda x, name=name: call(name, x, comm), in_axes=axis))(batch)
            each = jnp.stack([call(name, row, comm) for row in (one, 2 * one + 1)])
            if not same(found, each):
                yield f"{name}, batch along axis {axis}"


def order(comm: rd.Communicator) -> Iterator[str]:
    """Calls that do not depend on each other run in the order in which they were written."""

    @jax.jit
    def program(x: Any) -> Any:
        return [
            rd.jax.all_reduce(x, op, comm=comm)
            for op in ("sum", "max", "min", "prod")
            for _ in "ab"
        ]

    for _ in range(20):
        found = program(jnp.full((5,), comm.rank + 1.0))
    if not same(found[2], jnp.full((5,), float(comm.size))):
        yield "max"


def exchanged(comm: rd.Communicator) -> Iterator[str]:
    """Messages go around, and cotangents the other way."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    turn = partial(rd.jax.sendrecv, dst=after, src=before, comm=comm)
    x = jnp.arange(3.0) + comm.rank
    for run in (turn, jax.jit(turn)):
        if not same(run(x), jnp.arange(3.0) + before):
            yield "sendrecv"
    grad = jax.grad(lambda x: (turn(x) * (comm.rank + 1)).sum())(x)
    if not same(grad, jnp.full(3, after + 1.0)):
        yield f"gradient of sendrecv: {grad}"
    if not same(jax.jvp(turn, (x,), (2 * x,))[1], 2 * (jnp.arange(3.0) + before)):
        yield "jvp of sendrecv"
    if comm.size > 1 and comm.rank == 0:
        jax.jit(lambda x: rd.jax.send(x, 1, 7, comm=comm))(x)
    if comm.rank == 1:
        like = jax.ShapeDtypeStruct((3,), x.dtype)
        if not same(jax.jit(lambda: rd.jax.recv(like, 0, 7, comm=comm))(), jnp.arange(3.0)):
            yield "recv"


def dense(name: str, op: str, xs: Any, weights: Any) -> Any:
    """Compute what all ranks together compute, on one device."""
    folds: dict[str, Any] = {
        "sum": jnp.sum,
        "avg": jnp.mean,
        "prod": jnp.prod,
        "min": jnp.min,
        "max": jnp.max,
    }

    def folded(some: Any) -> Any:
        return folds[op](jnp.stack(list(some)), axis=0)

    size = len(xs)
    parts = [
        expected(name, [xs[each] for each in range(size)], rank, folded, xs[0] * 0)
        for rank in range(size)
    ]
    return sum((jnp.sin(part) * weights[rank]).sum() for rank, part in enumerate(parts))


def modes(function: Callable[[Any], Any], x: Any, tangent: Any) -> dict[str, Any]:
    """Differentiate in every way."""
    grad = jax.grad(function)
    return {
        "grad": grad(x),
        "vmap of grad": jax.vmap(grad)(jnp.stack([x * 0, x]))[1],
        "grad of checkpoint": jax.grad(jax.checkpoint(function))(x),
        "jvp": jax.jvp(function, (x,), (tangent,))[1],
        "second derivative": jax.jvp(grad, (x,), (tangent,))[1],
    }


def gradients(comm: rd.Communicator, only: str = "") -> Iterator[str]:  # noqa: C901 - one law
    """What ranks differentiate is what one device does that has it all, in every mode."""
    asked = only.split(",")
    rank, weights = comm.rank, jnp.arange(1.0, comm.size + 1)
    for name in (*REDUCING, *MOVING):
        ops = [op for op in DIFFERENTIABLE if (op, "float64") in cells(name)]
        ops = [op for op in ops if not only or f"{name}-{op}" in asked]
        xs = jnp.stack([jnp.asarray(x) for x in drawn(name, "float64", comm.size)])
        tangents = jnp.cos(jnp.arange(xs.size, dtype=float)).reshape(xs.shape)

        def here(op: str, x: Any, name: str = name) -> Any:
            result = call(name, x, comm, op)
            if name == "exscan" and rank == 0:
                result = jnp.where(jnp.ones((), bool), 0, result)  # as `dense` has it
            return (jnp.sin(result) * weights[rank]).sum()

        def found(x: Any, tangent: Any, ops: Any = ops, here: Any = here) -> Any:
            every = {op: modes(partial(here, op), x, tangent) for op in ops}
            for op in ops:  # forwards the sum of what ranks get is the tangent of the whole
                every[op]["jvp"] = rd.jax.all_reduce(every[op]["jvp"], comm=comm)
            return every

        def wanted(xs: Any, tangents: Any, ops: Any = ops, name: str = name) -> Any:
            every = {op: partial(dense, name, op, weights=weights) for op in ops}
            return {op: modes(whole, xs, tangents) for op, whole in every.items()}

        of_ranks = jax.jit(found)(xs[rank], tangents[rank])
        of_one = jax.jit(wanted)(xs, tangents)
        for op in ops:
            for mode, result in of_ranks[op].items():
                one = of_one[op][mode]
                if not same(result, one if mode == "jvp" else one[rank], close=True):
                    yield f"{mode} of {name} {op}: {result.tolist()}, not {one.tolist()}"
    x = jnp.arange(3.0)
    if not same(jax.grad(lambda x: rd.jax.all_reduce(x, comm=comm).sum())(x), x * 0 + comm.size):
        yield "grad outside of a program"


def training(comm: rd.Communicator) -> Iterator[str]:
    """Ranks with a part of the batch each train as one device does with all of it."""
    rows = jnp.sin(jnp.arange(12 * comm.size * 3, dtype=float)).reshape(-1, 3)
    mine = rows[12 * comm.rank : 12 * comm.rank + 12]
    parameters = {"w": jnp.arange(3.0) + comm.rank, "b": jnp.array(comm.rank, jnp.float32)}

    def loss(parameters: Any, rows: Any) -> Any:
        return ((jnp.tanh(rows @ parameters["w"]) + parameters["b"]) ** 2).mean()

    parameters = rd.jax.broadcast_parameters(parameters, comm.size + ROOT, comm=comm)
    if not same(parameters["w"], jnp.arange(3.0) + comm.size + ROOT):
        yield "broadcast_parameters"
    value, grads = jax.jit(rd.jax.value_and_grad(loss, comm=comm))(parameters, mine)
    whole, wanted = jax.value_and_grad(loss)(parameters, rows)
    if not same(value, whole, close=True):
        yield "the value"
    if not all(np.allclose(grads[name], wanted[name], rtol=1e-6) for name in wanted):
        yield "the gradients"
    both = rd.jax.grad(lambda p, r: (loss(p, r), r.shape), has_aux=True, comm=comm)
    if both(parameters, mine)[1] != (12, 3):
        yield "what comes beside"


LAWS = {
    law.__name__: law
    for law in (values, eager, control, batches, order, exchanged, gradients, training)
}


def broken(law: Callable[[rd.Communicator], Iterator[str]], comm: rd.Communicator) -> list[str]:
    return [f"rank {comm.rank} of {comm.size}: {what}" for what in law(comm)]


def main(engine: str, sizes: str, *asked: str) -> None:
    found = {}
    for name, _, only in (law.partition(":") for law in asked or LAWS):
        law: Any = partial(LAWS[name], only=only) if only else LAWS[name]  # type: ignore[call-arg]
        for size in map(int, sizes.split(",")):
            # Of ranks that are threads one compiles after the other, and some wait for the last.
            told = rd.run(partial(broken, law), ranks=size, engine=engine, timeout=500)
            found[f"{name} on {size}"] = list(chain(*told))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
