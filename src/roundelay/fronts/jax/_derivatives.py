"""Derivatives: forwards the same collective, backwards its true adjoint.

What is differentiated is the sum over all ranks of what they compute. So a cotangent goes back the
way on which values came: an all-reduce is its own adjoint, an all-gather's is a reduce-scatter.
"""

# JAX tells little of its types to who writes primitives.
# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from roundelay.collectives import collectives
from roundelay.fronts.jax._primitives import PRIMITIVES, bind
from roundelay.reductions import LOGICAL

__all__: list[str] = []

LINEAR = ("sum", "avg")
#: How ranks fold, and what changes nothing there.
FOLDS: dict[str, tuple[Any, float]] = {
    "max": (jnp.max, -math.inf), "min": (jnp.min, math.inf), "prod": (jnp.prod, 1.0),
}  # fmt: skip


def _jvp(name: str, primals: Any, tangents: Any, **params: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    result = bind(name, x, **params)
    if not collectives.load(name).reduces or params["op"] in LINEAR:
        return result, bind(name, tangent, **params)
    if params["op"] in LOGICAL:
        return result, jnp.zeros_like(result)
    if name in ("all_reduce", "reduce"):
        weight = _weight(x, result if name == "all_reduce" else None, params)
        return result, bind(name, tangent * weight, **{**params, "op": "sum"})
    return result, _of_fold(name, x, tangent, params)


def _weight(x: Any, result: Any, params: Any) -> Any:
    """Return how the result follows this rank's `x`, element by element."""
    group, op = params["group"], params["op"]
    if op == "prod":  # the product of all others', which a zero does not hide
        every = bind("all_gather", x, **{**params, "op": "sum"})
        return jnp.prod(every.at[group.rank].set(1), axis=0)
    if result is None:
        result = bind("all_reduce", x, **params)
    owns = (x == result).astype(x.dtype)
    return owns / bind("all_reduce", owns, **{**params, "op": "sum"})


def _of_fold(name: str, x: Any, tangent: Any, params: Any) -> Any:
    """Return the tangent of what this rank folds, once it has what others bring."""
    group, moved = params["group"], {**params, "op": "sum"}
    way = "all_to_all" if name == "reduce_scatter" else "all_gather"
    values, tangents = bind(way, x, **moved), bind(way, tangent, **moved)
    # By the same program on every rank, whatever it folds: JAX leaves out what is not used, and
    # with it a call that others make.
    up_to = {"scan": group.rank + 1, "exscan": group.rank}.get(name, group.size)
    folded = jnp.arange(group.size).reshape(-1, *[1] * (values.ndim - 1)) < up_to
    fold, nothing = FOLDS[params["op"]]
    mine = jnp.where(folded, values, jnp.asarray(nothing, values.dtype))
    return jax.jvp(partial(fold, axis=0), (mine,), (jnp.where(folded, tangents, 0),))[1]


def _transpose(name: str, cotangent: Any, _: Any, **params: Any) -> list[Any]:
    group, averages = params["group"], params["op"] == "avg"
    there = ADJOINT[name]
    if name in ("scan", "exscan"):
        group = group.backwards(params["place"])
    result = bind(there, ad.instantiate_zeros(cotangent), **{**params, "group": group, "op": "sum"})
    return [result / group.size if averages else result]


ADJOINT = {
    "all_gather": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "broadcast": "reduce",
    "exscan": "exscan",
    "gather": "scatter",
    "reduce": "broadcast",
    "reduce_scatter": "all_gather",
    "scan": "scan",
    "scatter": "gather",
}

for _name in ADJOINT:
    ad.primitive_jvps[PRIMITIVES[_name]] = partial(_jvp, _name)
    ad.primitive_transposes[PRIMITIVES[_name]] = partial(_transpose, _name)
