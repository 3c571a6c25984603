"""Operations on numpy arrays: what fronts of frameworks other than torch stand on."""

# What operations give, they give as Any.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from roundelay.arguments import index_of
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod.basics import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    global_process_set,
)
from roundelay.fronts.horovod.errors import UnsupportedOperationError
from roundelay.fronts.horovod.operation import Operation, Terms
from roundelay.fronts.horovod.session import Session, current
from roundelay.processes.wire import decode, encode
from roundelay.reductions import Array

__all__ = [
    "allgather", "allgather_object", "allreduce", "alltoall", "broadcast", "broadcast_object",
    "reducescatter", "stand_in",
]  # fmt: skip

WORDS = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "prod"}
Arrays = Sequence[Any]  # arrays, or what numpy makes one of
Scales = tuple[float, float]


def allreduce(
    arrays: Arrays,
    op: int = Average,
    name: str | None = None,
    scales: Scales = (1.0, 1.0),
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Return arrays reduced over the ranks of a process set, all of them at once."""
    if op == Adasum:
        raise UnsupportedOperationError(
            "op=hvd.Adasum is there in roundelay.horovod.torch only; take hvd.Average or hvd.Sum."
        )
    here, given = _given("allreduce()", arrays, process_set)
    _require_dtypes(given, op)
    factors = ("prescale_factor and postscale_factor", tuple(map(float, scales)))
    terms = (*_terms(given), ("op", op), factors)
    return _done(here, "allreduce", name, process_set, terms,
                 lambda comm: [_reduced(comm, array, op, scales) for array in given])  # fmt: skip


def stand_in(terms: Terms) -> Operation:
    """Return the operation of a rank that has joined: zeros in the place of arrays."""
    said = dict(terms)

    def run(comm: Communicator) -> None:
        for dtype, shape in zip(said.get("dtype", ()), said.get("shape", ()), strict=True):
            _reduced(comm, np.zeros(shape, _dtype(dtype)), said["op"], (1.0, 1.0))

    return Operation("allreduce", "of a rank that has joined", 0, terms, run)


def allgather(
    arrays: Arrays, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Return the rows of all ranks, of which each may have another number."""
    here, given = _given("allgather()", arrays, process_set, rows=True)

    def run(comm: Communicator) -> list[Array]:
        rows = comm.all_gather(np.array([len(array) for array in given], np.int64)).T.tolist()
        pairs = zip(given, rows, strict=True)
        return [comm.all_gather(array, axis=0, counts=counts) for array, counts in pairs]

    return _done(here, "allgather", name, process_set, _row_terms(given), run)


def broadcast(
    arrays: Arrays,
    root: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Return the root's arrays."""
    here, given = _given("broadcast()", arrays, process_set)
    members = here.members(process_set)
    if index_of(root) not in members:
        raise InvalidArgumentError(
            f"hvd.broadcast has no root_rank {root!r}: the process set has ranks {list(members)}."
        )
    place = members.index(root)
    terms = (*_terms(given), ("root_rank", root))
    return _done(here, "broadcast", name, process_set, terms,
                 lambda comm: [comm.broadcast(array.copy(), place) for array in given])  # fmt: skip


def alltoall(
    array: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Array, Array]:
    """Return the rows that others sent to this rank, and how many came from whom."""
    here, (given,) = _given("alltoall()", [array], process_set, rows=True)
    size = len(here.members(process_set))
    if splits is None:
        if len(given) % size:
            raise InvalidArgumentError(
                f"hvd.alltoall without splits= needs rows that divide by the {size} ranks, not "
                f"{len(given)}."
            )
        splits = [len(given) // size] * size
    counts = np.asarray(splits)
    if counts.shape != (size,) or counts.dtype.kind not in "iu" or counts.sum() > len(given):
        raise InvalidArgumentError(
            f"hvd.alltoall takes splits of {size} whole numbers that add up to at most the "
            f"{len(given)} rows there are, not {counts.tolist()}."
        )

    def run(comm: Communicator) -> tuple[Array, Array]:
        told = comm.all_to_all(counts.astype(np.int64).reshape(-1, 1)).reshape(-1)
        came = comm.all_to_all(given[: counts.sum()], axis=0, counts=counts.tolist())
        return came, told.astype(np.int32)

    result: tuple[Array, Array] = _done(
        here, "alltoall", name, process_set, _row_terms([given]), run
    )
    return result


def reducescatter(
    arrays: Arrays,
    op: int = Average,
    name: str | None = None,
    scales: Scales = (1.0, 1.0),
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Return this rank's share of the rows of reduced arrays; lower ranks have one more."""
    if op not in (Average, Sum):
        raise InvalidArgumentError("hvd.reducescatter takes op=hvd.Sum or hvd.Average only.")
    here, given = _given("reducescatter()", arrays, process_set, rows=True)
    _require_dtypes(given, op)

    def share(comm: Communicator, array: Array) -> Array:
        base, extra = divmod(len(array), comm.size)
        counts = [base + (rank < extra) for rank in range(comm.size)]
        add = partial(comm.reduce_scatter, op="sum", axis=0, counts=counts)
        scaled = _scaled(array, scales[0])
        mine = _mean(scaled, comm.size, add) if op == Average else add(scaled)
        return _scaled(mine, scales[1])

    factors = ("prescale_factor and postscale_factor", tuple(map(float, scales)))
    terms = (*_terms(given), ("op", op), factors)
    return _done(here, "reducescatter", name, process_set, terms,
                 lambda comm: [share(comm, array) for array in given])  # fmt: skip


def broadcast_object(
    thing: Any,
    root: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank of the process set; it is pickled."""
    name = name or type(thing).__name__
    mine = current("broadcast_object()").rank == root
    data = np.frombuffer(encode(thing, allow_pickle=True) if mine else b"", np.uint8)
    (length,) = broadcast([np.array([len(data)])], root, f"{name}.size", process_set)
    data = data if mine else np.empty(int(length[0]), np.uint8)
    (came,) = broadcast([data], root, f"{name}.bytes", process_set)
    return thing if mine else decode(came.tobytes(), allow_pickle=True)


def allgather_object(
    thing: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return everybody's object, in the order of ranks; they are pickled."""
    name = name or type(thing).__name__
    data = np.frombuffer(encode(thing, allow_pickle=True), np.uint8)
    (sizes,) = allgather([np.array([len(data)])], f"{name}.size", process_set)
    (joined,) = allgather([data], f"{name}.bytes", process_set)
    parts = np.split(joined, np.cumsum(sizes)[:-1])
    return [decode(part.tobytes(), allow_pickle=True) for part in parts]


def _reduced(comm: Communicator, array: Array, op: int, scales: Scales) -> Array:
    add: Callable[..., Any] = partial(comm.all_reduce, op=WORDS[op])
    scaled = _scaled(array, scales[0]).copy()
    return _scaled(_mean(scaled, comm.size, add) if op == Average else add(scaled), scales[1])


def _mean(array: Array, size: int, add: Callable[..., Any]) -> Array:
    """Return the mean; of whole numbers exactly, rounded towards zero: no sum of them wraps."""
    if array.dtype.kind not in "iu":
        total = add(array)
        return (total / np.asarray(size, total.dtype)).astype(total.dtype)
    wide = array.astype(np.int64)
    parts, rest = add(wide // size), add(wide % size)  # the sum is parts · size + rest
    found = parts + rest // size
    return (found + ((found < 0) & (rest % size != 0))).astype(array.dtype)


def _require_dtypes(given: Sequence[Array], op: int) -> None:
    for array in given:
        if op == Average and array.dtype.name in ("bool", "uint64"):
            raise InvalidArgumentError(
                f"hvd.Average takes no {array.dtype.name}. Use hvd.Max or hvd.Min, or int64."
            )


def _scaled(array: Array, factor: float) -> Array:
    """Multiply: whole numbers in float64, small floats in float32, then back."""
    if factor == 1.0:
        return array
    exact = np.dtype(np.float64)
    if array.dtype.kind not in "iu":
        exact = np.promote_types(array.dtype, np.float32)
    return (array.astype(exact) * exact.type(factor)).astype(array.dtype)


def _done(here: Session, kind: str, name: str | None, process_set: ProcessSet, terms: Terms,
          run: Any) -> Any:  # fmt: skip
    number = process_set.process_set_id or 0
    return here.negotiation.wait(here.submit(kind, name, number, terms, run))


def _given(
    call: str, arrays: Arrays, process_set: ProcessSet, *, rows: bool = False
) -> tuple[Session, list[Array]]:
    here = current(call)
    here.members(process_set)
    given = [np.ascontiguousarray(array).reshape(np.shape(array)) for array in arrays]
    if rows and any(array.ndim == 0 for array in given):
        raise InvalidArgumentError(f"hvd.{call} takes arrays with at least one dim, no scalars.")
    return here, given


def _terms(arrays: Sequence[Array]) -> Terms:
    return (
        ("dtype", tuple(array.dtype.name for array in arrays)),
        ("shape", tuple(array.shape for array in arrays)),
    )


def _row_terms(arrays: Sequence[Array]) -> Terms:
    dtypes, _ = _terms(arrays)
    return dtypes, ("shape but the first dim", tuple(array.shape[1:] for array in arrays))


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes  # noqa: PLC0415 - whoever reduces bfloat16 here has it

        return ml_dtypes.bfloat16
    return np.dtype(name)
