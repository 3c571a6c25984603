"""Gradients of Keras on JAX: one call of Python for all of them, inside its compiled step.

What goes wrong there is raised as what it is, by the line that ran the step.
"""

# JAX tells little of its types to who writes primitives.
# mypy: disable-error-code="no-untyped-call, unused-ignore"

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax._src.callback import _callback_op_sharding
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from roundelay.fronts.jax_programs import EFFECT, kept_for, lower_to_python, raise_ours

__all__ = ["called"]

Run = Callable[..., Sequence[Any]]


def called(run: Run, grads: Sequence[Any]) -> list[Any]:
    """Run a function of arrays on gradients, in the order of the program."""
    return list(GRADIENTS.bind(*grads, run=run))


def _abstract(*grads: Any, run: Run) -> Any:
    del run
    return [jax.core.ShapedArray(grad.shape, grad.dtype) for grad in grads], {EFFECT}


def _lower(ctx: Any, *grads: Any, run: Run) -> Any:
    def call(*arrays: Any) -> tuple[Any, ...]:
        return tuple(kept_for(run, lambda: run(*arrays)))

    # Of a model that lies on several devices, one of them makes the call.
    one = _callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out)
    return lower_to_python(ctx, call, *grads, sharding=one)


def _primitive() -> Primitive:
    made = Primitive("roundelay_hvd_gradients")
    made.multiple_results = True
    made.def_impl(partial(xla.apply_primitive, made))
    made.def_effectful_abstract_eval(_abstract)
    mlir.register_lowering(made, _lower)
    return made


raise_ours()
GRADIENTS = _primitive()
