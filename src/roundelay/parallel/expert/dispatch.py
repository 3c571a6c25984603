"""Tokens on their way to experts and back: two uneven all-to-alls, which autograd goes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from roundelay.communicator import Communicator
from roundelay.parallel.functions import counts_of
from roundelay.parallel.passes import going_back, number_of
from roundelay.parallel.scratch import Scratch, large, plain, scratch_of

__all__ = ["Dispatch", "planned"]

Matrix = list[list[int]]
CALL = "rd.MoE"
CACHED = 1 << 19  # bytes of rows that are added at a time


def _alike() -> float:
    return 1.0


@dataclass(frozen=True)
class Dispatch:
    """Which rows go where: made once for a batch, and used on the way there and back."""

    comm: Communicator | None
    choices: torch.Tensor  # of each row that is sent, in tokens · top_k; sorted by expert
    kept: torch.Tensor | None  # [tokens, top_k]: which choices are sent; None for all
    rows: torch.Tensor  # [tokens, top_k]: the row of each choice that is
    counts: Matrix  # rows that come, from each rank to each expert that is here
    there: Matrix  # rows from each rank to each
    number: int = 0  # of the forward pass that it is for
    #: How much this rank's loss weighs, while it goes backward, beside those of others.
    weight: Callable[[], float] = _alike

    @cached_property
    def tokens(self) -> torch.Tensor:
        """The token of each row that is sent."""
        return self.choices // self.rows.shape[1]

    @cached_property
    def back(self) -> Matrix:
        """Rows from each rank to each, on the way back."""
        return [list(column) for column in zip(*self.there, strict=True)]

    @cached_property
    def each(self) -> list[int]:
        """Rows of each expert that is here."""
        return [sum(theirs) for theirs in zip(*self.counts, strict=True)]

    def scatter(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the tokens of all ranks that this rank's experts get, a tensor for each expert."""
        if self.comm is None or self.comm.size == 1:
            return list(torch.split(x.index_select(0, self.tokens), self.each))
        if torch.is_grad_enabled():
            return list(_There.apply(x, self, self.tokens, self.comm))  # type: ignore[no-untyped-call]
        return list(self.send_tokens(self.comm, x, self.tokens))

    def gather(self, outputs: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        """Return for every token what its experts said, weighted; nothing for what was dropped."""
        weights = weights.to(outputs[0].dtype)
        if self.comm is None or self.comm.size == 1:
            return _weighed(torch.cat(list(outputs)), weights, self)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*outputs, weights)):
            rows = _Back.apply(self, self.comm, *outputs)  # type: ignore[no-untyped-call]
            return _weighed(rows, weights, self)
        with scratch_of(self.comm) as scratch:  # nobody keeps the rows
            came = scratch.rows("came", self.most, len(self.choices), outputs[0])
            return _weighed(self.take_back(self.comm, outputs, came, scratch), weights, self)

    @cached_property
    def most(self) -> int:
        """The rows that any rank sends or gets."""
        return max(map(sum, (*self.there, *self.back)))

    def send_tokens(
        self, comm: Communicator, x: torch.Tensor, tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Send the rows that `tokens` names, or all, sorted; return those of each expert here."""
        with scratch_of(comm) as scratch:
            sent = scratch.rows("sent", self.most, len(self.choices), x)
            if tokens is None:
                sent.copy_(x)
            else:
                torch.index_select(x.detach(), 0, tokens, out=sent)
            came = scratch.rows("came", self.most, sum(self.each), sent)
            comm.all_to_all(plain(sent), out=plain(came), axis=0, counts=self.there)
            # They come rank by rank, and of each rank expert by expert.
            pieces = came.split_with_sizes([count for theirs in self.counts for count in theirs])
            found = [large(came, (count, *came.shape[1:])) for count in self.each]
            for expert, each in enumerate(found):
                torch.cat(pieces[expert :: len(found)], out=each)
            return tuple(found)

    def take_back(
        self,
        comm: Communicator,
        outputs: Sequence[torch.Tensor],
        came: torch.Tensor,
        scratch: Scratch,
    ) -> torch.Tensor:
        """Send what each expert said to where its rows came from; return `came`, filled."""
        by_expert = [
            said.split_with_sizes([theirs[expert] for theirs in self.counts])
            for expert, said in enumerate(outputs)
        ]
        sent = scratch.rows("sent", self.most, sum(self.each), outputs[0])
        torch.cat([piece for theirs in zip(*by_expert, strict=True) for piece in theirs], out=sent)
        comm.all_to_all(plain(sent), out=plain(came), axis=0, counts=self.back)
        return came


class _There(torch.autograd.Function):
    """Rows to experts: those that `tokens` names, or all of them, which are sorted already."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, plan: Dispatch, tokens: torch.Tensor | None, comm: Communicator
    ) -> tuple[torch.Tensor, ...]:  # Any: torch's
        ctx.plan, ctx.tokens = plan, tokens
        return plan.send_tokens(comm, x, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with going_back(CALL, ctx.plan.comm, ctx.plan.number) as ranks:
            rows = _Back.apply(ctx.plan, ranks, *grads)  # type: ignore[no-untyped-call]
        weight = ctx.plan.weight()  # which whoever has parameters on this rank will see to
        rows = rows if weight in (0, 1) else rows / weight
        return rows if ctx.tokens is None else _weighed(rows, None, ctx.plan), None, None, None


class _Back(torch.autograd.Function):
    """What experts said, or gradients, to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, plan: Dispatch, comm: Communicator, *outputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.plan = plan
        said = [each.detach() for each in outputs]
        came = large(said[0], (len(plan.choices), *said[0].shape[1:]))
        with scratch_of(comm) as scratch:
            return plan.take_back(comm, said, came, scratch)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        there: Any = _There
        weight = (
            ctx.plan.weight()
        )  # where experts add them up, gradients of ranks are as they count
        grad = grads[0] * weight if weight not in (0, 1) else grads[0]
        grad = grad if weight else torch.zeros_like(grad)  # a mean over no rows is NaN
        with going_back(CALL, ctx.plan.comm, ctx.plan.number) as ranks:
            return None, None, *there.apply(grad, ctx.plan, None, ranks)


def _weighed(rows: torch.Tensor, weights: torch.Tensor | None, plan: Dispatch) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return _summed(rows, weights, plan)
    total: torch.Tensor = _Weighed.apply(rows, weights, plan)  # type: ignore[no-untyped-call]
    return total


class _Weighed(torch.autograd.Function):
    """The sum of each token's rows, times their weights if there are any."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor | None, plan: Dispatch
    ) -> torch.Tensor:  # Any: torch's
        ctx.plan = plan
        ctx.save_for_backward(*([] if weights is None else [rows, weights]))
        return _summed(rows, weights, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        plan: Dispatch = ctx.plan
        saved = ctx.saved_tensors  # once: a checkpoint gives them away
        if not saved:
            return grads[0].index_select(0, plan.tokens), None, None
        rows, weights = saved
        spread = large(grads[0], rows.shape)
        if torch.is_grad_enabled():
            spread = grads[0].index_select(0, plan.tokens)
        else:
            torch.index_select(grads[0], 0, plan.tokens, out=spread)
        flat = weights.reshape(-1)
        each = torch.einsum("rd,rd->r", spread.flatten(1), rows.flatten(1))
        of_weights = torch.zeros_like(flat).index_copy(0, plan.choices, each).view_as(weights)
        (mine,) = _columns(flat.index_select(0, plan.choices)[:, None], rows)
        return spread * mine if torch.is_grad_enabled() else spread.mul_(mine), of_weights, None


Columns = Sequence[torch.Tensor | None]  # a weight for each token, for its first choice and so on


def _columns(weights: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
    """Return each column of weights in a shape that goes with rows."""
    return [column.view(-1, *(1,) * (rows.dim() - 1)) for column in weights.detach().unbind(1)]


def _summed(rows: torch.Tensor, weights: torch.Tensor | None, plan: Dispatch) -> torch.Tensor:
    columns = [None] * plan.rows.shape[1] if weights is None else _columns(weights, rows)
    if plan.kept is None:
        return _all_summed(rows, columns, plan)
    return _kept_summed(rows, columns, plan, plan.kept)


def _all_summed(rows: torch.Tensor, columns: Columns, plan: Dispatch) -> torch.Tensor:
    """Sum where nothing was dropped: some tokens at a time, so that what they add is in cache.

    One choice after the other, so that sums have one order whatever came when.
    """
    total = large(rows, (len(plan.rows), *rows.shape[1:]))
    at_a_time = max(1, CACHED * len(total) // max(1, total.nbytes))
    said = rows.new_empty(min(at_a_time, len(total)), *rows.shape[1:])
    for start in range(0, len(total), at_a_time):
        some = total[start : start + at_a_time]
        tokens = slice(start, start + len(some))
        for choice, column in enumerate(columns):
            added = said[: len(some)] if choice else some
            torch.index_select(rows, 0, plan.rows[tokens, choice], out=added)
            if choice == 0:
                some.mul_(1 if column is None else column[tokens])
            elif column is None:
                some.add_(added)
            else:
                some.addcmul_(added, column[tokens])
    return total


def _kept_summed(
    rows: torch.Tensor, columns: Columns, plan: Dispatch, kept: torch.Tensor
) -> torch.Tensor:
    """Sum what was not dropped, in the same order."""
    total = rows.new_zeros(len(kept), *rows.shape[1:])
    for choice, column in enumerate(columns):
        chosen = kept[:, choice].nonzero().squeeze(1)
        said = rows.index_select(0, plan.rows[:, choice].index_select(0, chosen))
        total.index_add_(0, chosen, said if column is None else said * column[chosen])
    return total


def planned(
    experts: torch.Tensor,
    kept: torch.Tensor | None,
    counts: torch.Tensor,
    comm: Communicator | None,
    weight: Callable[[], float] | None = None,
) -> Dispatch:
    """Return where this rank's tokens go; `counts[rank][expert]` is what each rank sends."""
    size = counts.shape[0]
    rank = 0 if comm is None else comm.rank
    owned = counts_of(counts.shape[1], size)
    first = [sum(owned[:other]) for other in range(size)]
    every: Matrix = counts.tolist()
    flat = experts.reshape(-1)
    if kept is None:
        chosen = flat.argsort(stable=True)
    else:
        chosen = kept.reshape(-1).nonzero().squeeze(1)
        chosen = chosen[flat[chosen].argsort(stable=True)]
    rows = torch.zeros_like(flat) if kept is not None else torch.empty_like(flat)
    rows.scatter_(0, chosen, torch.arange(len(chosen), device=experts.device))
    return Dispatch(
        comm,
        chosen,
        kept,
        rows.view_as(experts),
        counts=[theirs[first[rank] : first[rank] + owned[rank]] for theirs in every],
        there=[
            [sum(mine[at : at + count]) for at, count in zip(first, owned, strict=True)]
            for mine in every
        ],
        number=0 if comm is None else number_of(comm),
        weight=weight or _alike,
    )
