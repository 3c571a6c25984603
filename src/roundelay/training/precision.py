"""In which dtypes a model computes, keeps its weights and reduces its gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch

from roundelay.arguments import shown, whole
from roundelay.errors import InvalidArgumentError, UnknownNameError

__all__ = [
    "Precision",
    "buffer_dtype",
    "cast_inputs",
    "cast_model",
    "cast_to",
    "master_dtype",
    "precision_of",
]

NAMED = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_SCALE = 2.0**16
BATCH_NORMS = (torch.nn.modules.batchnorm._NormBase,)  # noqa: SLF001 - instance norms too


@dataclass(frozen=True, slots=True)
class Precision:
    """Compute in one dtype, keep master weights of at least float32, reduce in either.

    `"bf16"` stands for `Precision(compute=torch.bfloat16)`, `"fp16"` for the same with
    `torch.float16`, which always scales the loss.
    """

    compute: torch.dtype | None = None  # None: the dtype that the model has, and no masters
    reduce: torch.dtype | None = None  # None: the dtype of the gradients as they come
    buffers: torch.dtype | None = None  # None: as they are, but for batch norms
    output: torch.dtype | None = None  # of model(x); None: as the model gives it
    loss_scale: float | None = None  # of the first step; None: 65536 for float16, none for others
    growth_interval: int | None = 2000  # good steps after which the scale doubles; None: never

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "buffers", "output"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise InvalidArgumentError(
                    f"Precision takes {name}=, a floating torch dtype, not {dtype!r}."
                )
        scale, interval = self.loss_scale, self.growth_interval
        if scale is not None and not (isinstance(scale, Real) and 0 < scale < math.inf):
            raise InvalidArgumentError(f"loss_scale is a number above 0, not {shown(scale)}.")
        if scale is not None and self.compute is None:
            raise InvalidArgumentError("loss_scale needs compute=, a half precision to cure.")
        if interval is not None:
            steps = whole("growth_interval", interval, 1)
            object.__setattr__(self, "growth_interval", steps)

    @property
    def mixed(self) -> bool:
        """Whether the model computes in another dtype than its master weights have."""
        return self.compute is not None

    @property
    def first_scale(self) -> float | None:
        """What the first loss is multiplied with; None where losses are not scaled."""
        if self.loss_scale is None and self.compute is torch.float16:
            return FIRST_SCALE
        return self.loss_scale


def precision_of(given: Any) -> Precision:  # Any: a word, an object, or a mistake to be named
    """Return what a word stands for."""
    if isinstance(given, Precision):
        return given
    if not isinstance(given, str):
        raise InvalidArgumentError(
            f"precision is one of {', '.join(NAMED)} or an rd.Precision, not {given!r}."
        )
    if given not in NAMED:
        raise UnknownNameError("precisions", given, NAMED)
    return Precision(compute=NAMED[given])


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the weights that an optimizer steps on: the model's, or float32.

    >>> master_dtype(torch.bfloat16), master_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def buffer_dtype(module: torch.nn.Module, precision: Precision) -> torch.dtype | None:
    """Return the dtype that a module's floating buffers are cast to; None: they stay."""
    if precision.compute is None:
        return None
    norm = isinstance(module, BATCH_NORMS) and not getattr(module, "keeps_statistics", False)
    own = precision.compute if norm else None
    return precision.buffers or own


def cast_model(model: torch.nn.Module, precision: Precision) -> None:
    """Bring floating parameters to the compute dtype, in place; buffers only if that is said.

    Parameters stay the same objects, so hooks, ties and optimizers that know them stay right.
    Positions and frequencies in buffers would be wrong when rounded. Batch norms, whose kernels
    want running means in the dtype of their weights, are the exception.
    """
    compute = precision.compute
    if compute is None:
        return
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.is_floating_point():
                tensor.grad = None
                if tensor.dtype != compute:  # parameters that are away have it already
                    tensor.data = tensor.data.to(compute)
        for module in model.modules():
            kind = buffer_dtype(module, precision)
            for buffer in module.buffers(recurse=False):
                if kind is not None and buffer.is_floating_point():
                    buffer.data = buffer.data.to(kind)


def cast_inputs(model: torch.nn.Module, precision: Precision) -> list[Any]:
    """Have `model(x)` bring floating tensors, however nested, to the compute dtype first.

    Returns handles that undo it.
    """
    compute, output = precision.compute, precision.output
    hooks: list[Any] = []
    if compute is not None:
        into = partial(_cast_inputs, compute)
        hooks.append(model.register_forward_pre_hook(into, with_kwargs=True))
    if output is not None:
        hooks.append(model.register_forward_hook(partial(_cast_outputs, output)))
    return hooks


def _cast_inputs(
    dtype: torch.dtype, _: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return cast_to(args, dtype), cast_to(options, dtype)


def _cast_outputs(dtype: torch.dtype, _: torch.nn.Module, __: Any, result: Any) -> Any:
    return cast_to(result, dtype)


def cast_to(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a value with its floating tensors, however nested, in another dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(cast_to(one, dtype) for one in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(cast_to(one, dtype) for one in value))
    if type(value) is dict:
        return {key: cast_to(one, dtype) for key, one in value.items()}
    return value
