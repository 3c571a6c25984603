"""What callers pass to Horovod's functions for PyTorch, checked where it comes in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from roundelay.arguments import number, shown
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod.basics import Adasum, Average
from roundelay.fronts.horovod.errors import UnsupportedOperationError

__all__ = [
    "compressor_of", "counts_of", "require_adasum", "require_dtypes", "require_rows", "scales_of",
    "tensor_of", "tensors_of",
]  # fmt: skip


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


def require_dtypes(dtypes: Sequence[torch.dtype], op: int) -> None:
    """Refuse what a reduction does not take."""
    for dtype in dtypes:
        if op == Average and dtype in (torch.bool, torch.uint64):
            raise InvalidArgumentError(
                f"hvd.Average takes no {dtype}. Use hvd.Max or hvd.Min, or tensor.long()."
            )
        if op == Adasum and not dtype.is_floating_point:
            raise InvalidArgumentError(
                f"hvd.Adasum compares the directions of real gradients, and takes no {dtype}. "
                f"Use hvd.Sum, or tensor.double()."
            )


def require_rows(call: str, tensor: torch.Tensor) -> None:
    """Refuse a scalar where rows are cut or joined."""
    if tensor.dim() == 0:
        raise InvalidArgumentError(
            f"hvd.{call} takes tensors with at least one dim; of a scalar, pass x.reshape(1)."
        )


def counts_of(tensor: torch.Tensor, splits: Any, size: int) -> list[int]:
    """Return how many rows go to each rank."""
    if splits is None:
        if len(tensor) % size:
            raise InvalidArgumentError(
                f"hvd.alltoall without splits= needs rows that divide by the {size} ranks, not "
                f"{len(tensor)}."
            )
        return [len(tensor) // size] * size
    try:
        told = torch.as_tensor(splits)
    except (TypeError, ValueError, RuntimeError):
        told = torch.empty(0)
    whole = not told.dtype.is_floating_point and not told.is_complex() and told.dtype != torch.bool
    if not whole or tuple(told.shape) != (size,):
        raise InvalidArgumentError(
            f"hvd.alltoall takes splits of {size} whole numbers, one for each rank, not "
            f"{shown(splits)}."
        )
    counts: list[int] = told.tolist()
    if min(counts) < 0 or sum(counts) > len(tensor):
        raise InvalidArgumentError(
            f"hvd.alltoall: splits {counts} add up to more than the {len(tensor)} rows there are, "
            f"or are negative."
        )
    return counts


def require_adasum(size: int, process_set: int) -> None:
    """Refuse Adasum where it can't be: it combines pairs."""
    if process_set:
        raise UnsupportedOperationError("op=hvd.Adasum works over all ranks, not a process set.")
    if size & (size - 1):
        raise UnsupportedOperationError(
            f"op=hvd.Adasum combines pairs of ranks, then pairs of pairs: it needs 2, 4, 8 … "
            f"ranks, not {size}."
        )
