"""A Keras optimizer whose gradients are those of all ranks, on whichever backend Keras has."""

# Keras has no types that mypy could read.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod import arrays
from roundelay.fronts.horovod.basics import Average, ProcessSet, global_process_set
from roundelay.fronts.horovod.errors import UnsupportedOperationError

__all__ = ["Compression", "DistributedOptimizer", "broadcast_model"]

Gradients = Sequence[Any]  # of the backend


class CompressionOfGradients:
    """What `compression=` takes: the dtype in which gradients travel."""

    none: Any = None
    fp16: Any = np.float16


Compression = CompressionOfGradients


class ReducedApply:
    """What a wrapped optimizer does more: gradients are reduced, by one call, and then applied."""

    _reduce: dict[str, Any]

    def apply(self, grads: Gradients, trainable_variables: Any = None) -> Any:
        """Step by the gradients of all ranks; a variable without one has none on any rank."""
        return super().apply(self._reduced(grads), trainable_variables)  # type: ignore[misc]

    def _reduced(self, grads: Gradients) -> Gradients:
        grads = list(grads)
        places = [place for place, grad in enumerate(grads) if grad is not None]
        reduced = reduce_gradients([grads[place] for place in places], **self._reduce)
        for place, grad in zip(places, reduced, strict=True):
            grads[place] = grad
        return grads


class ReducedScaledApply(ReducedApply):
    """The same of an optimizer that scales losses: on JAX it does not come by `apply`.

    It looks for infinities in gradients of all ranks, so that all of them step, or none does.
    """

    def stateless_apply(self, state: Any, grads: Gradients, trainable_variables: Any) -> Any:
        """Return the variables after a step by the gradients of all ranks."""
        return super().stateless_apply(state, self._reduced(grads), trainable_variables)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802, PLR0917 - Horovod's name and order
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,  # noqa: FBT001, FBT002
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    **_: Any,
) -> Any:
    """Make a Keras optimizer step by the gradients of all ranks, and return it.

    It keeps its class, name, options and state, and is saved as what it was.
    """
    del name, device_dense, device_sparse, sparse_as_dense, num_groups, groups
    del average_aggregated_gradients
    if backward_passes_per_step != 1:
        raise UnsupportedOperationError(
            f"backward_passes_per_step={backward_passes_per_step}: Keras 3 accumulates gradients "
            f"itself. Pass gradient_accumulation_steps={backward_passes_per_step} to the optimizer."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidArgumentError(
            f"hvd.DistributedOptimizer takes a Keras 3 optimizer, not {type(optimizer)}."
        )
    inner = getattr(optimizer, "inner_optimizer", None)  # of one that scales losses
    if isinstance(optimizer, ReducedApply) or isinstance(inner, ReducedApply):
        raise InvalidArgumentError("This optimizer is one of hvd.DistributedOptimizer already.")
    scales = (1.0, 1.0)
    if op == Average:
        scales = 1 / gradient_predivide_factor, gradient_predivide_factor
    reduce = {"op": op, "scales": scales, "compression": compression, "process_set": process_set}
    return _reducing(optimizer, reduce)


def _reducing(optimizer: Any, reduce: dict[str, Any]) -> Any:
    base = type(optimizer)
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    mixed = (ReducedScaledApply if scaled else ReducedApply, base)
    kind = type(base.__name__, mixed, {"__module__": base.__module__})
    object.__setattr__(optimizer, "__class__", kind)
    object.__setattr__(optimizer, "_reduce", reduce)
    return optimizer


def reduce_before_scaling(optimizer: Any) -> None:
    """Have gradients reduced before infinities are looked for, not by what is in the scaling.

    In mixed_float16 Keras puts the scaling around the optimizer that it is given.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(inner, ReducedApply) and not isinstance(optimizer, ReducedApply):
        object.__setattr__(inner, "__class__", type(inner).__bases__[-1])
        _reducing(optimizer, inner._reduce)  # noqa: SLF001 - our own


def reduce_gradients(
    grads: Gradients, op: int, scales: tuple[float, float], compression: Any,
    process_set: ProcessSet,
) -> Gradients:  # fmt: skip
    """Return gradients reduced over ranks, of the backend that Keras has, also while it traces."""
    if not grads:
        return grads

    def run(*given: Any) -> list[Any]:
        arrayed = [np.asarray(one) for one in given]
        packed = [one.astype(compression or one.dtype) for one in arrayed]
        found = arrays.allreduce(packed, op, None, scales, process_set)
        return [one.astype(was.dtype) for one, was in zip(found, arrayed, strict=True)]

    backend = keras.backend.backend()
    if backend == "tensorflow":
        from roundelay.fronts.horovod.keras import on_tensorflow  # noqa: PLC0415 - if it is there

        return on_tensorflow.called(run, grads)
    if backend == "jax":
        from roundelay.fronts.horovod.keras import on_jax  # noqa: PLC0415 - likewise

        return on_jax.called(run, grads)
    if backend == "torch":
        results = run(*(grad.detach().cpu().numpy() for grad in grads))
        return [grad.new_tensor(one) for grad, one in zip(grads, results, strict=True)]
    raise UnsupportedOperationError(
        f"Keras computes with {backend!r}: hvd takes its backends torch, jax and tensorflow."
    )


def broadcast_model(
    model: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Assign the root's values to all variables of a model, and of its optimizer if it is built."""
    every = list(model.variables)
    optimizer = getattr(model, "optimizer", None)
    reduce_before_scaling(optimizer)
    if optimizer is not None and optimizer.built:
        known = {id(one) for one in every}  # to compare variables would compare their values
        every += [one for one in optimizer.variables if id(one) not in known]
    values = [keras.ops.convert_to_numpy(one.value) for one in every]
    brought = arrays.broadcast(values, root_rank, process_set=process_set)
    for variable, value in zip(every, brought, strict=True):
        variable.assign(value)
