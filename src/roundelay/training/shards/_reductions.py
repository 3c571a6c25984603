"""Reductions of divided tensors to one number: each rank computes a part, all bring them together.

Parts are added up in the widest dtype of their kind, so that the number is at least as exact as
that of one device, and they are put together in one order, so that all ranks have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from roundelay.training.shards.shard import Shard

aten = torch.ops.aten
#: Takes a divided tensor and the rest of the arguments; NotImplemented where the whole is needed.
Reduction = Callable[..., Any]


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _sum(shard: Shard, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    piece = shard.piece
    kind = dtype or (piece.dtype if _inexact(piece.dtype) else torch.int64)
    part = piece.sum(dtype=_wide(kind))
    return shard.home.together(part).sum().to(kind)


def _mean(shard: Shard, *, dtype: torch.dtype | None = None) -> Any:
    kind = dtype or shard.piece.dtype
    if not _inexact(kind) or not shard.numel():
        return NotImplemented  # torch has its own words for it
    return (_sum(shard, dtype=_wide(kind)) / shard.numel()).to(kind)


def _extreme(name: str) -> Reduction:
    reduce = getattr(torch, name)

    def extreme(shard: Shard, dim: Sequence[int] = (), keepdim: bool = False) -> Any:  # noqa: FBT001, FBT002
        if (dim and len(dim) != shard.dim()) or keepdim or not shard.numel():
            return NotImplemented
        piece = shard.piece
        part = reduce(piece) if piece.numel() else piece.new_zeros(())
        every = shard.home.together(part).reshape(-1)
        return reduce(every[[count > 0 for count in shard.home.counts]])

    return extreme


def _logical(name: str) -> Reduction:
    reduce = getattr(torch, name)

    def logical(shard: Shard) -> torch.Tensor:
        part = reduce(shard.piece)
        found: torch.Tensor = reduce(shard.home.together(part))
        return found

    return logical


def _vector_norm(
    shard: Shard,
    ord: float = 2,  # noqa: A002 - torch's own word
    dim: Sequence[int] | None = None,
    keepdim: bool = False,  # noqa: FBT001, FBT002
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if (dim and len(dim) != shard.dim()) or keepdim or not shard.numel():
        return NotImplemented
    return norms([shard], ord, dtype)[0]


def _norm(shard: Shard, p: float | None = 2, *rest: Any, dtype: torch.dtype | None = None) -> Any:
    if rest or not shard.numel():
        return NotImplemented
    return norms([shard], 2 if p is None else p, dtype)[0]


def norms(
    shards: Sequence[Shard],
    order: float = 2,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return the norm of each of several tensors, by one call of all ranks."""
    if not shards:
        return []
    parts = []
    for shard in shards:
        piece = shard.piece
        wide = _wide(piece.dtype)
        part = torch.linalg.vector_norm(piece, order, dtype=wide) if piece.numel() else None
        # A rank without elements adds nothing: 0 to a sum or a largest, infinity to a smallest.
        nothing = math.inf if order < 0 else 0.0
        real = nothing if part is None else float(part.abs())
        parts.append(torch.tensor(real, dtype=torch.float64))
    every = shards[0].home.together(torch.stack(parts))
    total = every.sum(0) if order == 0 else torch.linalg.vector_norm(every, order, dim=0)
    return [
        one.to(shard.device, dtype or torch.empty(0, dtype=shard.piece.dtype).abs().dtype)
        for one, shard in zip(total, shards, strict=True)
    ]


def _dot(name: str) -> Reduction:
    multiply = getattr(torch, name)

    def dot(shard: Shard, other: torch.Tensor) -> Any:
        if other.shape != shard.shape or other.dtype != shard.dtype:
            return NotImplemented
        theirs = shard.beside(other)
        piece = shard.piece
        wide = _wide(piece.dtype)
        part = multiply(piece.to(wide), theirs.to(wide))
        return shard.home.together(part).sum().to(piece.dtype)

    return dot


def _equal(shard: Shard, other: torch.Tensor) -> Any:
    if other.shape != shard.shape:
        return False
    if shard.dim() == 0:
        return NotImplemented
    part = torch.tensor(torch.equal(shard.piece, shard.beside(other)))
    return bool(shard.home.together(part).all())


def _count(shard: Shard, dim: int | None = None) -> Any:
    if dim is not None:
        return NotImplemented
    return shard.home.together(torch.count_nonzero(shard.piece)).sum()


def _inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


#: By the names of torch's operators.
REDUCTIONS: dict[str, Reduction] = {
    "sum.default": _sum,
    "mean.default": _mean,
    "max.default": _extreme("amax"),
    "min.default": _extreme("amin"),
    "amax.default": _extreme("amax"),
    "amin.default": _extreme("amin"),
    "any.default": _logical("any"),
    "all.default": _logical("all"),
    "linalg_vector_norm.default": _vector_norm,
    "norm.Scalar": _norm,
    "norm.ScalarOpt_dtype": _norm,
    "dot.default": _dot("dot"),
    "vdot.default": _dot("vdot"),
    "equal.default": _equal,
    "count_nonzero.default": _count,
}
