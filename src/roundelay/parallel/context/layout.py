"""A sequence divided between ranks and put together again, and the places of a rank's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundelay.arguments import index_of, shown
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.parallel.context.agreement import agree
from roundelay.parallel.context.plan import Span, check_layout, spans_of, spans_so_long
from roundelay.parallel.passes import going_back, number_of

__all__ = ["in_order", "sequence_positions", "shard_sequence", "shares", "unshard_sequence"]


def shard_sequence(
    x: torch.Tensor, comm: Communicator, dim: int = 1, *, layout: str = "contiguous"
) -> torch.Tensor:
    """Return this rank's tokens of a whole sequence that all ranks have, along a dim.

    Lengths that do not divide are right: some ranks have one token more. The gradient of the whole
    is that of this rank's tokens, and zero elsewhere: those of all ranks add up, as those of
    parameters do. Tokens and targets are divided alike, before anything else.
    """
    dim, problem = _checked("shard_sequence", x, dim, layout)
    length = x.size(dim) if not problem else 0
    agree("shard_sequence", comm, {"layout": layout, "length": length}, 0, problem)
    if comm.size == 1:
        return x
    return _apply(_Shard, x, comm, dim, spans_of(length, comm.size, layout))


def unshard_sequence(
    x: torch.Tensor, comm: Communicator, dim: int = 1, *, layout: str = "contiguous"
) -> torch.Tensor:
    """Return the whole sequence of all ranks' shards, in the order of its tokens.

    The gradient of a shard is the sum of what the losses of all ranks say of its tokens. That is
    right where gradients of parameters are averaged over the ranks, as `rd.prepare` does, whether
    all go on with the whole alike or not.
    """
    dim, problem = _checked("unshard_sequence", x, dim, layout)
    rest = "" if problem else str([*x.shape[:dim], *x.shape[dim + 1 :], x.dtype])
    own = 0 if problem else x.size(dim)
    lengths = agree("unshard_sequence", comm, {"layout": layout, "shape": rest}, own, problem)
    if comm.size == 1:
        return x
    return _apply(_Unshard, x, comm, dim, spans_so_long(lengths, layout))


def sequence_positions(
    length: int,
    comm: Communicator,
    *,
    layout: str = "contiguous",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return where this rank's tokens stand in a sequence of so many: for embeddings of places.

    No rank hears of another here.
    """
    count = index_of(length)
    if count is None or count < 0:
        raise InvalidArgumentError(
            f"sequence_positions takes the whole sequence's length, a whole number, not "
            f"{shown(length)}."
        )
    spans = spans_of(count, comm.size, check_layout(layout))[comm.rank]
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])


def shares(whole: torch.Tensor, dim: int, spans: Sequence[tuple[Span, ...]]) -> list[torch.Tensor]:
    """Return every rank's tokens of a whole sequence."""
    return [
        torch.cat([whole.narrow(dim, start, stop - start) for start, stop in each], dim)
        for each in spans
    ]


def in_order(
    parts: Sequence[torch.Tensor], dim: int, spans: Sequence[tuple[Span, ...]]
) -> torch.Tensor:
    """Return the whole sequence of every rank's tokens."""
    pieces: list[tuple[Span, torch.Tensor]] = []
    for part, each in zip(parts, spans, strict=True):
        lengths = [stop - start for start, stop in each]
        pieces += zip(each, torch.split(part, lengths, dim), strict=True)
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)


def _checked(call: str, x: Any, dim: Any, layout: Any) -> tuple[int, str]:
    """Return the dim, counted from the front, and what is wrong."""
    try:
        check_layout(layout)
    except InvalidArgumentError as error:
        return 0, f"{call}: {error}"
    if not isinstance(x, torch.Tensor):
        return 0, f"{call} takes a tensor, not {shown(x)}."
    number = index_of(dim)
    if number is None or not -x.dim() <= number < x.dim():
        return 0, (
            f"{call}: a tensor of shape {list(x.shape)} has no dim {shown(dim)}. dim= says along "
            f"which the tokens are."
        )
    return number % x.dim(), ""


def _apply(kind: Any, x: torch.Tensor, *how: Any) -> torch.Tensor:  # Any: torch's
    result: torch.Tensor = kind.apply(x, *how)
    return result


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, dim: int, spans: list[tuple[Span, ...]]
    ) -> torch.Tensor:
        ctx.rank, ctx.how = comm.rank, (dim, spans)
        return shares(x, dim, spans[comm.rank : comm.rank + 1])[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dim, spans = ctx.how
        lengths = [sum(stop - start for start, stop in each) for each in spans]
        parts = [
            grads[0] if rank == ctx.rank else grads[0].new_zeros(()).expand(
                *grads[0].shape[:dim], length, *grads[0].shape[dim + 1 :])
            for rank, length in enumerate(lengths)
        ]  # fmt: skip
        return in_order(parts, dim, spans), None, None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, dim: int, spans: list[tuple[Span, ...]]
    ) -> torch.Tensor:
        ctx.how, ctx.number = (comm, dim, spans), number_of(comm)
        rows = x.detach().movedim(dim, 0).contiguous()
        counts = [sum(stop - start for start, stop in each) for each in spans]
        every = torch.split(comm.all_gather(rows, axis=0, counts=counts), counts)
        return in_order(every, 0, spans).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        comm, *how = ctx.how
        with going_back("rd.unshard_sequence", comm, ctx.number) as ranks:
            return _apply(_SumOfWholes, grads[0], ranks, *how), None, None, None


class _SumOfWholes(torch.autograd.Function):
    """The sum of what all ranks have of the whole, of which each keeps its tokens."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, dim: int, spans: list[tuple[Span, ...]]
    ) -> torch.Tensor:
        ctx.how, ctx.number = (comm, dim, spans), number_of(comm)
        parts = [part.movedim(dim, 0) for part in shares(x.detach(), dim, spans)]
        counts = [len(part) for part in parts]
        total = comm.reduce_scatter(torch.cat(parts).contiguous(), axis=0, counts=counts)
        return total.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        comm, *how = ctx.how
        with going_back("rd.unshard_sequence", comm, ctx.number) as ranks:
            return _apply(_Unshard, grads[0], ranks, *how), None, None, None
