"""Operations on TensorFlow's tensors, eager or inside `tf.function`, with gradients.

A function that is traced holds one Python call for each operation, which runs on numpy arrays.
TensorFlow keeps such calls in the order of the program.
"""

# TensorFlow has no types that mypy could read.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from roundelay.fronts.horovod import arrays
from roundelay.fronts.horovod.basics import (
    Average,
    ProcessSet,
    Sum,
    global_process_set,
    reduction_of,
)
from roundelay.fronts.horovod.errors import UnsupportedOperationError
from roundelay.fronts.horovod.session import current

__all__ = [
    "Compression", "allgather", "allreduce", "alltoall", "broadcast", "called",
    "grouped_allgather", "grouped_allreduce", "grouped_reducescatter", "reducescatter",
]  # fmt: skip

Tensor = Any  # of TensorFlow
Tensors = Sequence[Tensor]


class PlainTensors:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what travels, and the dtype to go back to."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return what came, as it was."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class HalfTensors(PlainTensors):
    """Sends floating point numbers as float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return float16 for any kind of float."""
        if tensor.dtype.is_floating:
            return tf.cast(tensor, tf.float16), tensor.dtype
        return tensor, None


class CompressionOfTensors:
    """What `compression=` takes."""

    none = PlainTensors
    fp16 = HalfTensors


Compression = CompressionOfTensors
Compress = type[PlainTensors]


def called(
    run: Callable[..., Sequence[Any]], tensors: Tensors, dtypes: Sequence[Any], shapes: Tensors
) -> list[Tensor]:
    """Run a function of arrays on tensors: now if they have values, else when they get them."""
    if tf.executing_eagerly():
        results = run(*(np.asarray(tensor) for tensor in tensors))
        return [tf.convert_to_tensor(one) for one in results]
    if not tf.inside_function():
        raise UnsupportedOperationError(
            "hvd: this operation is in a tf.Graph of TensorFlow 1, which keeps no order between "
            "calls: what one rank runs first would meet another call of another rank. Put it into "
            "tf.function, which keeps it, or call it eagerly."
        )
    results = tf.numpy_function(run, list(tensors), list(dtypes), stateful=True)
    if not dtypes:
        return []  # it is an operation then, without results
    for one, shape in zip(results, shapes, strict=True):
        one.set_shape(shape)
    return list(results)


def grouped_allreduce(  # noqa: PLR0917 - Horovod's order
    tensors: Tensors,
    average: bool | None = None,  # noqa: FBT001 - Horovod's order
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compress = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> list[Tensor]:
    """Return the tensors reduced, all of them in one call; of `IndexedSlices`, the rows of all."""
    del device_dense, device_sparse  # there are CPUs only
    op = reduction_of("allreduce", op, average)
    scales = prescale_factor, postscale_factor
    found: dict[int, Tensor] = {}
    dense = []
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            found[place] = _slices(tensor, op, process_set)
        else:
            dense.append((place, *compression.compress(tf.convert_to_tensor(tensor))))

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def reduced(*given: Tensor) -> Any:
        results = called(
            lambda *got: arrays.allreduce(got, op, name, scales, process_set),
            given, [one.dtype for one in given], [one.shape for one in given],
        )  # fmt: skip

        def grad(*upstream: Tensor) -> list[Tensor]:
            return grouped_allreduce(
                upstream, op=op, prescale_factor=prescale_factor,
                postscale_factor=postscale_factor, process_set=process_set,
            )  # fmt: skip

        return results, grad

    if dense:
        results = reduced(*(tensor for _, tensor, _ in dense))
        results = results if isinstance(results, (list, tuple)) else [results]
        for (place, _, context), result in zip(dense, results, strict=True):
            found[place] = compression.decompress(result, context)
    return [found[place] for place in range(len(tensors))]


def _slices(tensor: Any, op: int, process_set: ProcessSet) -> Any:
    values, indices = grouped_allgather([tensor.values, tensor.indices], process_set=process_set)
    if op == Average:
        size = len(current("allreduce()").members(process_set))
        values = values / tf.cast(size, values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=tensor.dense_shape)


def allreduce(  # noqa: PLR0917 - Horovod's order
    tensor: Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's order
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compress = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the tensor reduced over the ranks of the process set; its mean, unless told."""
    return grouped_allreduce(
        [tensor], average, device_dense, device_sparse, compression, op, prescale_factor,
        postscale_factor, process_set, name,
    )[0]  # fmt: skip


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return the rows of all ranks, of several tensors."""

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def gathered(*given: Tensor) -> Any:
        results = called(
            lambda *got: arrays.allgather(got, name, process_set),
            given, [one.dtype for one in given], [[None, *one.shape[1:]] for one in given],
        )  # fmt: skip

        def grad(*upstream: Tensor) -> list[Tensor]:
            means = grouped_allreduce(upstream, op=Average, process_set=process_set)
            rows = tf.stack([tf.shape(one, tf.int64)[0] for one in given])[tf.newaxis]
            counts = grouped_allgather([rows], process_set=process_set)[0]
            place = process_set.rank() or 0
            starts = tf.reduce_sum(counts[:place], axis=0)
            return [mean[starts[n] : starts[n] + counts[place, n]] for n, mean in enumerate(means)]

        return results, grad

    results = gathered(*(tf.convert_to_tensor(tensor) for tensor in tensors))
    return list(results) if isinstance(results, (list, tuple)) else [results]


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the rows of all ranks, one after the other."""
    return grouped_allgather([tensor], name, process_set)[0]


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the root's tensor."""

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def brought(given: Tensor) -> Any:
        (result,) = called(
            lambda *got: arrays.broadcast(got, root_rank, name, process_set),
            [given], [given.dtype], [given.shape],
        )  # fmt: skip

        def grad(upstream: Tensor) -> Tensor:
            mean = allreduce(upstream, op=Average, process_set=process_set)
            return mean if current("broadcast()").rank == root_rank else mean * 0

        return result, grad

    return brought(tf.convert_to_tensor(tensor))


def alltoall(
    tensor: Tensor,
    splits: Tensor = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # a tensor, or with splits two
    """Return the rows that others sent to this rank; with `splits`, also how many from whom."""
    told: list[Tensor] = [] if splits is None else [tf.convert_to_tensor(splits)]

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def exchanged(given: Tensor) -> Any:
        rows, counts = called(
            lambda array, counts=None: arrays.alltoall(array, counts, name, process_set),
            [given, *told], [given.dtype, tf.int32], [[None, *given.shape[1:]], [None]],
        )  # fmt: skip

        def grad(upstream: Tensor, _: Tensor) -> Tensor:
            return alltoall(upstream, counts, process_set=process_set)[0]

        return (rows, counts), grad

    rows, counts = exchanged(tf.convert_to_tensor(tensor))
    return rows if splits is None else (rows, counts)


def grouped_reducescatter(
    tensors: Tensors,
    device_dense: str = "",
    compression: Compress = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Tensor]:
    """Return this rank's shares of the rows of several reduced tensors."""
    del device_dense
    scales = prescale_factor, postscale_factor
    packed = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def shared(*given: Tensor) -> Any:
        results = called(
            lambda *got: arrays.reducescatter(got, op, name, scales, process_set),
            given, [one.dtype for one in given], [[None, *one.shape[1:]] for one in given],
        )  # fmt: skip

        def grad(*upstream: Tensor) -> list[Tensor]:
            size = len(current("reducescatter()").members(process_set))
            factor = prescale_factor * postscale_factor * (size if op == Sum else 1)
            scaled = [one * tf.cast(factor, one.dtype) for one in upstream]
            return grouped_allgather(scaled, process_set=process_set)

        return results, grad

    results = shared(*(tensor for tensor, _ in packed))
    results = results if isinstance(results, (list, tuple)) else [results]
    contexts = [context for _, context in packed]
    return [compression.decompress(*pair) for pair in zip(results, contexts, strict=True)]


def reducescatter(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Return this rank's share of the rows of the reduced tensor; see `grouped_reducescatter`."""
    return grouped_reducescatter([tensor], *arguments, **options)[0]
