"""Every collective for JAX arrays: a function of `x` that returns a new array.

They stand in functions that JAX compiles or differentiates, or are called as they are. All ranks
make the same calls in the same order, as everywhere; shapes and dtypes are those of all ranks.
"""

# JAX tells little of its types to who writes primitives.
# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from roundelay.arguments import index_of, shown
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError, UnsupportedReductionError, rank_count
from roundelay.fronts.jax import _derivatives as _derivatives  # noqa: PLC0414 - for what it does
from roundelay.fronts.jax._group import JaxGroup, array_of, group_of, place_here
from roundelay.fronts.jax._primitives import PRIMITIVES, bind
from roundelay.reductions import LOGICAL, reduction

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "exscan",
    "gather",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
]

Axis = Literal[0] | None


def all_reduce(x: Any, op: str = "sum", *, comm: Communicator) -> jax.Array:
    """Return `x` reduced over all ranks."""
    return _call("all_reduce", x, comm, op=op)


def reduce(x: Any, op: str = "sum", root: int = 0, *, comm: Communicator) -> jax.Array:
    """Return `x` reduced over all ranks at the root, and zeros of its shape elsewhere."""
    return _call("reduce", x, comm, op=op, root=root)


def broadcast(x: Any, root: int = 0, *, comm: Communicator) -> jax.Array:
    """Return the root's `x` on every rank."""
    return _call("broadcast", x, comm, root=root)


def all_gather(x: Any, *, axis: Axis = None, comm: Communicator) -> jax.Array:
    """Return everybody's `x`, stacked to (size, *shape); with axis=0 concatenated."""
    return _joined("all_gather", _call("all_gather", x, comm), axis)


def gather(x: Any, root: int = 0, *, axis: Axis = None, comm: Communicator) -> jax.Array:
    """Return everybody's `x`, stacked, at the root, and zeros of that shape elsewhere."""
    return _joined("gather", _call("gather", x, comm, root=root), axis)


def scatter(x: Any, root: int = 0, *, comm: Communicator) -> jax.Array:
    """Return row r of the root's `x` on rank r; `x` is (size, …) on every rank."""
    return _call("scatter", _rows("scatter", x, None, comm), comm, root=root)


def reduce_scatter(x: Any, op: str = "sum", *, axis: Axis = None, comm: Communicator) -> jax.Array:
    """Reduce `x`, which is (size, …), and return row r on rank r; with axis=0 a share of rows."""
    rows = _rows("reduce_scatter", x, axis, comm)
    return _joined("reduce_scatter", _call("reduce_scatter", rows, comm, op=op), None)


def all_to_all(x: Any, *, axis: Axis = None, comm: Communicator) -> jax.Array:
    """Send row d of `x`, which is (size, …), to rank d; row s of the result comes from rank s."""
    rows = _rows("all_to_all", x, axis, comm)
    return _joined("all_to_all", _call("all_to_all", rows, comm), axis)


def scan(x: Any, op: str = "sum", *, comm: Communicator) -> jax.Array:
    """Return `x` reduced over ranks 0 to this one."""
    return _call("scan", x, comm, op=op)


def exscan(x: Any, op: str = "sum", *, comm: Communicator) -> jax.Array:
    """Return `x` reduced over the ranks before this one; at rank 0 what changes no other value."""
    result = _call("exscan", x, comm, op=op)
    if comm.rank or op == "sum":
        return result
    # It follows the call, so that the ranks' programs stay alike whatever is made of them.
    neutral = jnp.asarray(_neutral(op, result.dtype), result.dtype)
    return jnp.where(jnp.ones((), bool), neutral, result)


def barrier(*, comm: Communicator) -> None:
    """Wait until all ranks are here: what is written after it runs when all have come to it."""
    group = group_of("barrier", comm)
    PRIMITIVES["barrier"].bind(group=group, op="max", root=0, place=place_here())


def _call(
    name: str, x: Any, comm: Communicator, *, op: str = "sum", root: int = 0
) -> Any:  # Any: an array, or what traces one
    group = group_of(name, comm)
    x = array_of(name, x, group)
    if name in ("all_reduce", "exscan", "reduce", "reduce_scatter", "scan"):
        _check_op(name, op, x.dtype.name)
        if op in LOGICAL:  # 0 and 1 also where a lone contribution is the result
            x = (x != 0).astype(x.dtype)
    return bind(name, x, group=group, op=op, root=_root(name, root, group), place=place_here())


def _check_op(name: str, op: object, dtype: str) -> None:
    if not isinstance(op, str):
        raise UnsupportedReductionError(
            f"rd.jax.{name} takes a reduction by its name, not {shown(op)}: a compiled program "
            f"calls no Python. Fold what rd.jax.all_gather brings, by functions of jax.numpy."
        )
    if op in ("maxloc", "minloc"):
        raise UnsupportedReductionError(
            f"rd.jax.{name} has no {op}: take {op[:3]} first, then all_reduce the rank with min "
            f"where x equals it."
        )
    reduction(op).check(dtype)
    if op == "avg" and name in ("scan", "exscan"):
        raise UnsupportedReductionError(
            f"{name} has no avg: every rank's result has another number of contributions. "
            f"Use sum, and divide by the rank's own count."
        )


def _root(name: str, root: object, group: JaxGroup) -> int:
    number = index_of(root)
    if number is None or not 0 <= number < group.size:
        raise InvalidArgumentError(
            f"rd.jax.{name} on {rank_count(group.size)} has no root {shown(root)}; roots go from 0 "
            f"to {group.size - 1}."
        )
    return number


def _check_axis(name: str, axis: object) -> None:
    if axis is not None and index_of(axis) != 0:
        raise InvalidArgumentError(
            f"rd.jax.{name} takes axis=None (stack) or axis=0, not {shown(axis)}."
        )


def _rows(name: str, x: Any, axis: Axis, comm: Communicator) -> Any:
    """Return `x` with a row for each rank."""
    _check_axis(name, axis)
    group = group_of(name, comm)
    size, x = group.size, array_of(name, x, group)
    rows = x.shape[0] if x.ndim else 0
    if axis is None and x.ndim and rows == size:
        return x
    if axis == 0 and x.ndim and rows % size == 0:
        return x.reshape(size, rows // size, *x.shape[1:])
    way = "a first dimension equal to the number of ranks" if axis is None else "rows that divide"
    raise InvalidArgumentError(
        f"rd.jax.{name} on {rank_count(size)} needs {way}, but x has shape {x.shape} on rank "
        f"{comm.rank}. Pad it, or pass axis=0 with rows that divide by {size}."
    )


def _joined(name: str, stacked: Any, axis: Axis) -> Any:
    """Return blocks one after the other along the first dimension, if that is asked for."""
    _check_axis(name, axis)
    if axis is None:
        return stacked
    if stacked.ndim < 2:  # noqa: PLR2004 - ranks, and rows
        raise InvalidArgumentError(f"rd.jax.{name} with axis=0 needs at least one dimension.")
    return stacked.reshape(-1, *stacked.shape[2:])


def _neutral(op: str, dtype: np.dtype[Any]) -> Any:
    """Return what changes no value that it is folded with."""
    if op in ("prod", "land", "band"):
        return ~np.zeros((), dtype) if op == "band" else 1
    if op not in ("max", "min"):
        return 0
    if dtype == np.bool_:
        return op == "min"
    if jnp.issubdtype(dtype, jnp.floating):
        return np.inf if op == "min" else -np.inf
    limits = jnp.iinfo(dtype)
    return limits.max if op == "min" else limits.min
