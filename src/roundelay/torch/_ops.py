"""torch's reductions by our names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from roundelay.errors import UnsupportedReductionError

__all__ = ["NAMES", "PREMUL_SUM", "named", "scaled"]

PREMUL_SUM = "premul_sum"

#: By hash, which is the number of the operation: comparing them takes twice as long.
NAMES = {
    hash(ReduceOp.SUM): "sum",
    hash(ReduceOp.AVG): "avg",
    hash(ReduceOp.PRODUCT): "prod",
    hash(ReduceOp.MIN): "min",
    hash(ReduceOp.MAX): "max",
    hash(ReduceOp.BAND): "band",
    hash(ReduceOp.BOR): "bor",
    hash(ReduceOp.BXOR): "bxor",
    hash(ReduceOp.PREMUL_SUM): PREMUL_SUM,
}


def named(op: Any) -> str:  # ReduceOp, or its enum
    """Return our name of a reduction; `premul_sum` is a sum of what `scaled` returns.

    >>> named(ReduceOp.PRODUCT)
    'prod'
    """
    name = NAMES.get(hash(op))
    if name is None:
        raise UnsupportedReductionError(f"{op} is no reduction that torch documents.")
    return name


def scaled(op: Any, tensor: Tensor) -> Tensor:  # ReduceOp
    """Return the tensor times the factor of a PREMUL_SUM."""
    with torch.no_grad():
        return tensor * torch.as_tensor(op.factor, dtype=tensor.dtype)
