"""One primitive for each collective: its shape, how it is lowered, and what `vmap` makes of it.

Every one has the same parameters: `group`, `op`, `root` and `place`, the user's line.
"""

# JAX tells little of its types to who writes primitives.
# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import abstract_token
from jax._src.sharding_impls import SPMDAxisContext
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla

from roundelay import _core
from roundelay.collectives import collectives
from roundelay.errors import InvalidArgumentError, MissingPackageError
from roundelay.fronts.jax._group import ROWS, JaxGroup, SourceLine, made_by_python
from roundelay.fronts.jax_programs import EFFECT, lower_to_python, raise_ours

__all__ = ["PRIMITIVES", "bind"]

TARGET = "roundelay_call"
Shape = tuple[int, ...]


def bind(
    name: str, x: Any, *, group: JaxGroup, op: str = "sum", root: int = 0, place: SourceLine | None
) -> Any:  # Any: an array, or what traces one
    """Make a call, now or in the program that is being traced."""
    return PRIMITIVES[name].bind(x, group=group, op=op, root=root, place=place)


def shape_of_result(name: str, shape: Shape, size: int) -> Shape:
    """Return the shape that a collective makes of another."""
    if name in ("all_gather", "gather"):
        return (size, *shape)
    return shape[1:] if name in ("reduce_scatter", "scatter") else shape


def _abstract(name: str, *xs: Any, group: JaxGroup, **_: object) -> Any:
    if name == "barrier":
        return [], {EFFECT}
    (x,) = xs
    shape = shape_of_result(name, x.shape, group.size)
    return jax.core.ShapedArray(shape, x.dtype), {EFFECT}


def _lower(
    name: str, ctx: Any, *xs: Any, group: JaxGroup, op: str, root: int, place: SourceLine | None
) -> Any:
    token = ctx.tokens_in.get(EFFECT)
    given = ctx.avals_in[0] if xs else jax.core.ShapedArray((0,), np.dtype(np.uint8))
    number = group.number(name, op, root, place, given)
    if number is None:

        def call(*arrays: Any) -> tuple[Any, ...]:
            x = np.asarray(arrays[0]) if arrays else np.empty(0, np.uint8)
            result = group.run(place, made_by_python(name, op, root, x))
            return () if result is None else (result,)

        return lower_to_python(ctx, call, *xs)
    both = ctx.replace(
        avals_in=(*ctx.avals_in, abstract_token), avals_out=(*ctx.avals_out, abstract_token)
    )
    rule = jax.ffi.ffi_lowering(TARGET, has_side_effect=True)
    *results, token = rule(both, *xs, token, call=np.int64(number))
    ctx.set_tokens_out(mlir.TokenSet({EFFECT: token}))
    return results


def _batch(name: str, xs: Any, axes: Any, **params: Any) -> Any:
    """Call once for all: rows for ranks stay first, and what is gathered comes before."""
    (x,), (axis,) = xs, axes
    if name in ROWS:
        x = jnp.moveaxis(x, axis, 1)
        result = PRIMITIVES[name].bind(x, **params)
        return result, 1 if name == "all_to_all" else 0
    result = PRIMITIVES[name].bind(x, **params)
    return result, axis + 1 if name in ("all_gather", "gather") else axis


def refuse_device(name: str) -> Any:
    """Return the lowering for all that is not a CPU."""

    def refuse(ctx: Any, *_: Any, **__: Any) -> Any:
        platforms = ", ".join(ctx.module_context.platforms)
        raise InvalidArgumentError(
            f"rd.jax.{name} runs on JAX's CPU backend, not on {platforms}. Compile the program "
            f"for it: with jax.default_device(jax.devices('cpu')[0]), or JAX_PLATFORMS=cpu."
        )

    return refuse


def on_one_device(name: str, lower: Any) -> Any:
    """Return a lowering that refuses programs over several devices: each would make the call."""

    def lower_there(ctx: Any, *xs: Any, **params: Any) -> Any:
        around = ctx.module_context.axis_context
        in_shard_map = isinstance(around, SPMDAxisContext)
        devices = around.mesh.size if in_shard_map else around.num_devices
        if devices != 1:
            raise InvalidArgumentError(
                f"rd.jax.{name} at {params['place']} stands in a program over {devices} devices, "
                f"and a rank has one. Give it arrays that lie on one, jax.device_put(x, "
                f"jax.devices('cpu')[0]), or start a rank for each device."
            )
        return lower(ctx, *xs, **params)

    return lower_there


def register_primitive(name: str, lower: Any, abstract: Any) -> Primitive:
    """Make a primitive that is compiled for the CPU alone, and run as a program of one call."""
    made = Primitive(f"roundelay_{name}")
    made.def_impl(partial(xla.apply_primitive, made))
    made.def_effectful_abstract_eval(abstract)
    mlir.register_lowering(made, on_one_device(name, lower), platform="cpu")
    mlir.register_lowering(made, refuse_device(name))
    return made


def _collective(name: str) -> Primitive:
    made = register_primitive(name, partial(_lower, name), partial(_abstract, name))
    made.multiple_results = name == "barrier"
    batching.primitive_batchers[made] = partial(_batch, name)
    return made


def _register_handler() -> None:
    """Tell XLA of the native core, if that was built where JAX could be found."""
    if not hasattr(_core, "jax_handler"):
        raise MissingPackageError(
            "rd.jax",
            "a native core that was built where jax could be found",
            how="in a clone, pip install scikit-build-core nanobind cmake ninja, and then pip "
            "install --no-build-isolation --force-reinstall --no-deps '.[jax]'",
        )
    jax.ffi.register_ffi_target(TARGET, _core.jax_handler(), platform="cpu")


_register_handler()
raise_ours()
PRIMITIVES = {name: _collective(name) for name in collectives.names()}
