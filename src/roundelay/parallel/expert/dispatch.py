"""Tokens on their way to experts and back: two uneven all-to-alls, which autograd goes through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundelay.communicator import Communicator
from roundelay.parallel.functions import counts_of

__all__ = ["Dispatch", "exchange", "planned"]


def exchange(
    x: torch.Tensor, comm: Communicator | None, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """Send rows of `x` to each rank, `sent[rank]` of them in turn; return those that come.

    Backward sends the gradients of rows to where the rows came from.
    """
    if comm is None or comm.size == 1:
        return x
    result: torch.Tensor = _Exchange.apply(x, comm, sent, received)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comm: Communicator, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:  # Any: torch's
        ctx.comm, ctx.sent, ctx.received = comm, sent, received
        return comm.all_to_all(x.detach().contiguous(), axis=0, counts=list(sent))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return exchange(grads[0], ctx.comm, ctx.received, ctx.sent), None, None, None


@dataclass(frozen=True)
class Dispatch:
    """Which rows go where: made once for a batch, and used on the way there and back."""

    comm: Communicator | None
    tokens: torch.Tensor  # of each row that is sent; rows are sorted by expert
    kept: torch.Tensor  # [tokens, top_k]: which choices are sent
    rows: torch.Tensor  # [tokens, top_k]: the row of each choice that is
    counts: list[list[int]]  # rows that come, from each rank to each expert that is here
    sent: list[int]  # rows to each rank

    @property
    def received(self) -> list[int]:
        """Rows from each rank."""
        return [sum(theirs) for theirs in self.counts]

    def scatter(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the tokens of all ranks that this rank's experts get, a tensor for each expert."""
        arrived = exchange(x.index_select(0, self.tokens), self.comm, self.sent, self.received)
        # They come rank by rank, and of each rank expert by expert.
        pieces = _pieces(arrived, [count for theirs in self.counts for count in theirs])
        here = len(self.counts[0])
        return [_joined(pieces[expert::here]) for expert in range(here)]

    def gather(self, outputs: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        """Return for every token what its experts said, weighted; nothing for what was dropped."""
        by_expert = [
            _pieces(said, [theirs[expert] for theirs in self.counts])
            for expert, said in enumerate(outputs)
        ]
        by_rank = _joined([piece for theirs in zip(*by_expert, strict=True) for piece in theirs])
        back = exchange(by_rank, self.comm, self.received, self.sent)
        total: torch.Tensor | None = None
        # One choice after the other, so that sums have one order whatever came when.
        for choice, column in enumerate(weights.to(back.dtype).unbind(1)):
            chosen = self.kept[:, choice].nonzero().squeeze(1)
            said = back.index_select(0, self.rows[:, choice].index_select(0, chosen))
            weight = column.index_select(0, chosen)[:, None]
            if len(chosen) == len(weights):
                total = said * weight if total is None else total.addcmul_(said, weight)
            else:
                total = back.new_zeros(len(weights), *back.shape[1:]) if total is None else total
                total = total.index_add_(0, chosen, said * weight)
        return back.new_zeros(0) if total is None else total


def planned(
    experts: torch.Tensor, kept: torch.Tensor, counts: torch.Tensor, comm: Communicator | None
) -> Dispatch:
    """Return where this rank's tokens go; `counts[rank][expert]` is what each rank sends."""
    top_k, size = experts.shape[1], counts.shape[0]
    rank = 0 if comm is None else comm.rank
    owned = counts_of(counts.shape[1], size)
    first = sum(owned[:rank])
    every: list[list[int]] = counts.tolist()
    chosen = kept.reshape(-1).nonzero().squeeze(1)
    chosen = chosen[experts.reshape(-1)[chosen].argsort(stable=True)]
    rows = torch.zeros_like(experts).reshape(-1)
    rows[chosen] = torch.arange(len(chosen), device=experts.device)
    starts = [sum(owned[:other]) for other in range(size)]
    return Dispatch(
        comm,
        chosen // top_k,
        kept,
        rows.view_as(experts),
        counts=[theirs[first : first + owned[rank]] for theirs in every],
        sent=[sum(every[rank][at : at + count]) for at, count in zip(starts, owned, strict=True)],
    )


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the pieces one after the other; a single one as it is."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _pieces(x: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    pieces: tuple[torch.Tensor, ...] = torch.split(x, lengths)
    return pieces
