"""Collectives that autograd goes through: each one's backward is another of them.

What a gradient means depends on who computes on. Where every rank goes on with the same tensor and
the same loss, a gradient is whole on each rank (`copy`, `reduce`, `gather`, `split`). Where ranks
go on with losses of their own, which add up to the model's, gradients are parts that add up, too
(`all_gather`, `reduce_scatter`, `all_to_all`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundelay.communicator import Communicator
from roundelay.parallel.cut_tensor import unmarked
from roundelay.parallel.passes import going_back, number_of, whole_gradients_of

__all__ = [
    "all_gather",
    "all_to_all",
    "by",
    "copy",
    "counts_of",
    "gather",
    "reduce",
    "reduce_scatter",
    "split",
]

Change = Callable[[torch.Tensor], torch.Tensor]
Back = Callable[[torch.Tensor, Communicator], torch.Tensor]


def counts_of(length: int, ranks: int) -> list[int]:
    """Return how many rows each rank has of so many: alike, or one more on the first ranks.

    >>> counts_of(8, 4), counts_of(7, 3)
    ([2, 2, 2, 2], [3, 2, 2])
    """
    each, more = divmod(length, ranks)
    return [each + (rank < more) for rank in range(ranks)]


def copy(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return `x` as it is; its gradient is the sum of what every rank computes from it."""
    return _apply("copy", x, comm, lambda own: own.view_as(own), reduce)


def reduce(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return the sum over ranks, with which all go on alike; the gradient goes back as it is."""
    return _apply(
        "reduce",
        x,
        comm,
        lambda own: comm.all_reduce(own.detach().clone(memory_format=torch.contiguous_format)),
        copy,
    )


def gather(
    x: torch.Tensor, comm: Communicator, dim: int = 0, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Return all ranks' `x` along a dim, with which all go on alike; each gets its own gradient."""
    return _apply(
        "gather",
        x,
        comm,
        lambda own: _gathered(own, comm, dim, counts),
        lambda grad, ranks: split(grad, ranks, dim, counts),
    )


def split(
    x: torch.Tensor, comm: Communicator, dim: int = 0, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Return this rank's share of an `x` that all ranks have; gradients come together again."""
    shares = counts or counts_of(x.size(dim), comm.size)
    start, length = sum(shares[: comm.rank]), shares[comm.rank]
    return _apply(
        "split",
        x,
        comm,
        lambda whole: whole.detach().narrow(dim, start, length).contiguous().clone(),
        lambda grad, ranks: gather(grad, ranks, dim, shares),
    )


def all_gather(
    x: torch.Tensor, comm: Communicator, dim: int = 0, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Return all ranks' `x` along a dim; what every rank computes from it adds up."""
    return _apply(
        "all_gather",
        x,
        comm,
        lambda own: _gathered(own, comm, dim, counts),
        lambda grad, ranks: reduce_scatter(grad, ranks, dim, counts),
    )


def reduce_scatter(
    x: torch.Tensor, comm: Communicator, dim: int = 0, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Return this rank's share of the sum over ranks along a dim."""
    shares = counts or counts_of(x.size(dim), comm.size)
    return _apply(
        "reduce_scatter",
        x,
        comm,
        lambda own: _scattered(own, comm, dim, shares),
        lambda grad, ranks: all_gather(grad, ranks, dim, shares),
    )


def all_to_all(
    x: torch.Tensor, comm: Communicator, split_dim: int, concat_dim: int
) -> torch.Tensor:
    """Cut `x` along one dim, give every rank its piece, and put what comes together along another.

    The dim that is cut divides by the number of ranks.
    """

    def exchanged(own: torch.Tensor) -> torch.Tensor:
        pieces = torch.stack(own.detach().chunk(comm.size, split_dim))
        return torch.cat(list(comm.all_to_all(pieces)), concat_dim)

    return _apply(
        "all_to_all",
        x,
        comm,
        exchanged,
        lambda grad, ranks: all_to_all(grad, ranks, concat_dim, split_dim),
    )


def by(layer: str, x: torch.Tensor, crossing: str = "") -> torch.Tensor:
    """Have a crossing know for which layer it is, and by another name what it is."""
    node: Any = x.grad_fn  # Any: torch's
    if hasattr(node, "crossing"):
        node.layer, node.crossing = layer, crossing or node.crossing
    return x


TAKES = ("reduce", "reduce_scatter", "all_gather", "gather")  # parts, and know of the others

MAKES_WHOLE = ("reduce", "gather")  # so that gradients that come are whole, and go on as parts


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 - as torch marks its own
def _apply(name: str, x: torch.Tensor, comm: Communicator, run: Change, back: Back) -> torch.Tensor:
    if comm.size == 1:
        return x
    x = unmarked(x, inside=name in TAKES)
    kind: Any = _Collective  # Any: torch does not say what it takes
    result: torch.Tensor = kind.apply(x, name, comm, run, back)
    return result


class _Collective(torch.autograd.Function):
    """A collective, and the one that takes its gradients back, through which autograd goes too."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, name: str, comm: Communicator, run: Change, back: Back
    ) -> torch.Tensor:  # Any: torch's
        ctx.crossing = name
        ctx.comm, ctx.number, ctx.back = comm, number_of(comm), back
        ctx.watch = whole_gradients_of(comm) if name in MAKES_WHOLE else None
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        layer = getattr(ctx, "layer", "")
        if ctx.watch is not None:
            ctx.watch.note_output(layer or f"{ctx.crossing}()", ctx.number, grads[0])
        with going_back("a divided layer or sequence", ctx.comm, ctx.number, layer) as ranks:
            return ctx.back(grads[0], ranks), None, None, None, None


def _gathered(
    x: torch.Tensor, comm: Communicator, dim: int, counts: Sequence[int] | None
) -> torch.Tensor:
    rows = x.detach().movedim(dim, 0).contiguous()
    even = counts is None or len(set(counts)) == 1
    every = comm.all_gather(rows, axis=0, counts=None if even else list(counts or ()))
    return every.movedim(0, dim).contiguous()


def _scattered(
    x: torch.Tensor, comm: Communicator, dim: int, counts: Sequence[int]
) -> torch.Tensor:
    rows = x.detach().movedim(dim, 0).contiguous()
    even = len(set(counts)) == 1
    mine = comm.reduce_scatter(rows, axis=0, counts=None if even else list(counts))
    return mine.movedim(0, dim).contiguous()
