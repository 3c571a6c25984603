"""What callers pass to Horovod's functions for PyTorch, checked where it comes in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from roundelay.arguments import number, shown
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod.errors import UnsupportedOperationError

__all__ = ["compressor_of", "scales_of", "tensor_of", "tensors_of"]


def tensor_of(call: str, value: object) -> torch.Tensor:
    """Return the tensor that a value is, if it has memory of its own, element by element."""
    if not isinstance(value, torch.Tensor):
        raise InvalidArgumentError(f"hvd.{call} takes tensors, not {shown(value)}.")
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise UnsupportedOperationError(
            f"hvd.{call} takes dense tensors with data, not {value.layout} on {value.device}; for "
            f"sparse ones there is hvd.sparse_allreduce_async."
        )
    return value


def tensors_of(call: str, values: object) -> list[torch.Tensor]:
    """Return the tensors that an iterable has."""
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise InvalidArgumentError(f"hvd.{call} takes a list of tensors, not {shown(values)}.")
    return [tensor_of(call, value) for value in values]


def scales_of(before: object, after: object) -> tuple[float, float]:
    """Return both factors as numbers."""
    if type(before) is float and type(after) is float:
        return before, after
    return number("prescale_factor", before), number("postscale_factor", after)


def compressor_of(value: Any) -> Any:
    """Return what compresses tensors, if it can."""
    if not callable(getattr(value, "compress", None)):
        raise InvalidArgumentError(
            f"compression= takes hvd.Compression.none or .fp16, or a class with compress and "
            f"decompress, not {shown(value)}."
        )
    return value
