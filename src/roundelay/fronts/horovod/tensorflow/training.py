"""Variables brought to all ranks, and gradients that are those of all ranks."""

# TensorFlow has no types that mypy could read.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import tensorflow as tf

from roundelay.fronts.horovod import arrays
from roundelay.fronts.horovod.basics import Average, ProcessSet, global_process_set
from roundelay.fronts.horovod.tensorflow.collectives import (
    Compression,
    called,
    grouped_allreduce,
)

__all__ = [
    "DistributedGradientTape", "DistributedOptimizer", "allgather_object", "broadcast_object",
    "broadcast_variables",
]  # fmt: skip


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,  # noqa: FBT001, FBT002 - Horovod's order
) -> None:
    """Assign the root's values to variables, of TensorFlow or of Keras, all in one call."""
    del inplace  # how Horovod saves memory; values are the same

    def brought(*given: Any) -> Any:
        return arrays.broadcast(given, root_rank, process_set=process_set)

    every = list(variables)
    if tf.executing_eagerly():
        values = brought(*(one.numpy() for one in every))
    else:
        tensors = [tf.convert_to_tensor(one) for one in every]
        dtypes, shapes = [one.dtype for one in tensors], [one.shape for one in tensors]
        values = called(brought, tensors, dtypes, shapes)
    for variable, value in zip(every, values, strict=True):
        variable.assign(value)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank; it is pickled."""
    del session  # of TensorFlow 1
    return arrays.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return everybody's object, in the order of ranks; they are pickled."""
    del session
    return arrays.allgather_object(obj, name, process_set)


class ReducedTape:
    """A gradient tape whose gradients are those of all ranks, by one call for all of them."""

    def __init__(self, tape: Any, reduce: dict[str, Any], *, sparse_as_dense: bool) -> None:
        self._tape, self._reduce, self._sparse_as_dense = tape, reduce, sparse_as_dense

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> Self:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        return self._tape.__exit__(*error)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None) -> Any:
        """Return gradients reduced over ranks; a source without one has none on any rank."""
        grads = self._tape.gradient(target, sources, output_gradients)
        flat = tf.nest.flatten(grads, expand_composites=False)
        if self._sparse_as_dense:
            flat = [None if one is None else tf.convert_to_tensor(one) for one in flat]
        there = [one for one in flat if one is not None]
        reduced = iter(grouped_allreduce(there, **self._reduce) if there else [])
        return tf.nest.pack_sequence_as(
            grads, [None if one is None else next(reduced) for one in flat]
        )


def DistributedGradientTape(  # noqa: N802, PLR0917 - Horovod's name and order
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tape with gradients reduced over all ranks, by one call for all of them."""
    del device_dense, device_sparse, num_groups, groups
    reduce: dict[str, Any] = {"op": op, "compression": compression, "process_set": process_set}
    if op == Average and gradient_predivide_factor != 1.0:
        reduce["prescale_factor"] = 1 / gradient_predivide_factor
        reduce["postscale_factor"] = gradient_predivide_factor
    return ReducedTape(gradtape, reduce, sparse_as_dense=sparse_as_dense)


def DistributedOptimizer(optimizer: Any, *arguments: Any, **options: Any) -> Any:  # noqa: N802
    """Make a Keras optimizer step by the gradients of all ranks; for others there is the tape."""
    from roundelay.fronts.horovod.keras.optimizer import (  # noqa: PLC0415 - needs Keras
        DistributedOptimizer as Distributed,
    )

    return Distributed(optimizer, *arguments, **options)
