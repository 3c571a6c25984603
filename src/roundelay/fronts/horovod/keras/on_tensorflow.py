"""Gradients of Keras on TensorFlow: one Python call for all of them, also in a traced function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["called"]


def called(run: Callable[..., Sequence[Any]], grads: Sequence[Any]) -> list[Any]:
    """Run a function of arrays on gradients, now or when the traced function runs."""
    dense = [tf.convert_to_tensor(grad) for grad in grads]
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(one) for one in run(*(grad.numpy() for grad in dense))]
    results = tf.numpy_function(run, dense, [grad.dtype for grad in dense], stateful=True)
    for one, grad in zip(results, dense, strict=True):
        one.set_shape(grad.shape)
    return list(results)
