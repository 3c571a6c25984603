"""Collectives that autograd goes through: each one's backward is another of them.

What a gradient means depends on who computes on. Where every rank goes on with the same tensor and
the same loss, a gradient is whole on each rank (`copy`, `reduce`, `gather`, `split`). Where ranks
go on with losses of their own, which add up to the model's, gradients are parts that add up, too
(`all_gather`, `reduce_scatter`, `all_to_all`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundelay.communicator import Communicator

__all__ = [
    "all_gather",
    "all_to_all",
    "copy",
    "counts_of",
    "gather",
    "reduce",
    "reduce_scatter",
    "split",
]


def counts_of(length: int, ranks: int) -> list[int]:
    """Return how many rows each rank has of so many: alike, or one more on the first ranks.

    >>> counts_of(8, 4), counts_of(7, 3)
    ([2, 2, 2, 2], [3, 2, 2])
    """
    each, more = divmod(length, ranks)
    return [each + (rank < more) for rank in range(ranks)]


def copy(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return `x` as it is; its gradient is the sum of what every rank computes from it."""
    return _apply(_Copy, x, comm)


def reduce(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return the sum over ranks, with which all go on alike; the gradient goes back as it is."""
    return _apply(_Reduce, x, comm)


def gather(
    x: torch.Tensor, comm: Communicator, dim: int = 0, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Return all ranks' `x` along a dim, with which all go on alike; each gets its own gradient."""
    return _apply(_Gather, x, comm, dim, counts)


def split(
    x: torch.Tensor, comm: Communicator, dim: int = 0, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Return this rank's share of an `x` that all ranks have; gradients come together again."""
    return _apply(_Split, x, comm, dim, counts or counts_of(x.size(dim), comm.size))


def all_gather(
    x: torch.Tensor, comm: Communicator, dim: int = 0, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Return all ranks' `x` along a dim; what every rank computes from it adds up."""
    return _apply(_AllGather, x, comm, dim, counts)


def reduce_scatter(
    x: torch.Tensor, comm: Communicator, dim: int = 0, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Return this rank's share of the sum over ranks along a dim."""
    return _apply(_ReduceScatter, x, comm, dim, counts or counts_of(x.size(dim), comm.size))


def all_to_all(
    x: torch.Tensor, comm: Communicator, split_dim: int, concat_dim: int
) -> torch.Tensor:
    """Cut `x` along one dim, give every rank its piece, and put what comes together along another.

    The dim that is cut divides by the number of ranks.
    """
    return _apply(_AllToAll, x, comm, split_dim, concat_dim)


def _apply(kind: Any, x: torch.Tensor, comm: Communicator, *how: Any) -> torch.Tensor:
    if comm.size == 1:
        return x
    result: torch.Tensor = kind.apply(x, comm, *how)
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:  # Any: torch's
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return reduce(grads[0], ctx.comm), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return comm.all_reduce(x.detach().clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return copy(grads[0], ctx.comm), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, dim: int, counts: Sequence[int] | None
    ) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.counts = comm, dim, counts
        return _gathered(x, comm, dim, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return split(grads[0], ctx.comm, ctx.dim, ctx.counts), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, dim: int, counts: Sequence[int]
    ) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.counts = comm, dim, counts
        return _own(x, comm, dim, counts).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gather(grads[0], ctx.comm, ctx.dim, ctx.counts), None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, dim: int, counts: Sequence[int] | None
    ) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.counts = comm, dim, counts
        return _gathered(x, comm, dim, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return reduce_scatter(grads[0], ctx.comm, ctx.dim, ctx.counts), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, dim: int, counts: Sequence[int]
    ) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.counts = comm, dim, counts
        rows = x.detach().movedim(dim, 0).contiguous()
        even = len(set(counts)) == 1
        mine = comm.reduce_scatter(rows, axis=0, counts=None if even else list(counts))
        return mine.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return all_gather(grads[0], ctx.comm, ctx.dim, ctx.counts), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, split_dim: int, concat_dim: int
    ) -> torch.Tensor:
        ctx.comm, ctx.dims = comm, (concat_dim, split_dim)
        pieces = torch.stack(x.detach().chunk(comm.size, split_dim))
        return torch.cat(list(comm.all_to_all(pieces)), concat_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return all_to_all(grads[0], ctx.comm, *ctx.dims), None, None, None


def _gathered(
    x: torch.Tensor, comm: Communicator, dim: int, counts: Sequence[int] | None
) -> torch.Tensor:
    rows = x.detach().movedim(dim, 0).contiguous()
    even = counts is None or len(set(counts)) == 1
    every = comm.all_gather(rows, axis=0, counts=None if even else list(counts or ()))
    return every.movedim(0, dim).contiguous()


def _own(x: torch.Tensor, comm: Communicator, dim: int, counts: Sequence[int]) -> torch.Tensor:
    return x.detach().narrow(dim, sum(counts[: comm.rank]), counts[comm.rank]).contiguous()
