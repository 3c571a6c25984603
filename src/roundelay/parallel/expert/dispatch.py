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
    choices: torch.Tensor  # of each row that is sent: token * top_k + choice, sorted by expert
    top_k: int
    tokens: int
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    order: torch.Tensor  # which of the rows that came is next, expert by expert
    rows: list[int]  # of each expert that is here

    def scatter(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tokens of all ranks that this rank's experts get, a tensor for each expert."""
        rows = x.index_select(0, self.choices // self.top_k)
        arrived = exchange(rows, self.comm, self.sent, self.received)
        return _pieces(arrived.index_select(0, self.order), self.rows)

    def gather(self, outputs: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        """Return for every token what its experts said, weighted; nothing for what was dropped."""
        said = torch.cat(list(outputs))
        back = exchange(
            said.index_select(0, self.order.argsort()), self.comm, self.received, self.sent
        )
        shape = (self.tokens * self.top_k, *back.shape[1:])
        # Every choice has a place of its own, so that sums have one order whatever came when.
        placed = back.new_zeros(shape).index_copy(0, self.choices, back)
        parts = placed.view(self.tokens, self.top_k, *back.shape[1:])
        return (parts * weights.to(back.dtype)[..., None]).sum(1)


def planned(
    experts: torch.Tensor, kept: torch.Tensor, counts: torch.Tensor, comm: Communicator | None
) -> Dispatch:
    """Return where this rank's tokens go; `counts[rank][expert]` is what each rank sends."""
    top_k, size = experts.shape[1], counts.shape[0]
    rank = 0 if comm is None else comm.rank
    owned = counts_of(counts.shape[1], size)
    chosen = kept.reshape(-1).nonzero().squeeze(1)
    by_expert = experts.reshape(-1)[chosen].argsort(stable=True)
    first = sum(owned[:rank])
    here = counts[:, first : first + owned[rank]].cpu()  # [from rank, expert of this rank]
    return Dispatch(
        comm,
        chosen[by_expert],
        top_k,
        len(experts),
        sent=[int(part.sum()) for part in _pieces(counts[rank].cpu(), owned)],
        received=here.sum(1).tolist(),
        order=_by_expert(here).to(experts.device),
        rows=here.sum(0).tolist(),
    )


def _pieces(x: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    pieces: tuple[torch.Tensor, ...] = torch.split(x, lengths)
    return pieces


def _by_expert(counts: torch.Tensor) -> torch.Tensor:
    """Return where the rows of each expert lie among rows that came rank by rank.

    >>> _by_expert(torch.tensor([[2, 1], [1, 2]])).tolist()
    [0, 1, 3, 2, 4, 5]
    """
    ranks, experts = counts.shape
    names = torch.arange(experts).repeat(ranks)
    return names.repeat_interleave(counts.reshape(-1)).argsort(stable=True)
