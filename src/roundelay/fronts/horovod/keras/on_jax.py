"""Gradients of Keras on JAX: one ordered callback for all of them, inside its compiled step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import io_callback

__all__ = ["called"]


def called(run: Callable[..., Sequence[Any]], grads: Sequence[Any]) -> list[Any]:
    """Run a function of arrays on gradients, in the order of the program."""
    kinds = [jax.ShapeDtypeStruct(grad.shape, grad.dtype) for grad in grads]  # type: ignore[no-untyped-call, unused-ignore]
    return list(io_callback(run, kinds, *grads, ordered=True))
