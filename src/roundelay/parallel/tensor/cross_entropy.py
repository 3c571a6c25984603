"""`rd.cross_entropy`: the loss of logits whose vocabulary is cut, which are never gathered."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import torch

from roundelay.arguments import index_of, number, shown
from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, CommunicationError, InvalidArgumentError
from roundelay.parallel.cut_tensor import CutTensor, unmarked
from roundelay.parallel.passes import label_of, number_of, whole_gradients_of
from roundelay.training.shards.operands import digest

__all__ = ["cross_entropy"]

REDUCTIONS = ("mean", "sum", "none")
HALVES = (torch.float16, torch.bfloat16)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    comm: Communicator,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    vocabulary: int | None = None,
) -> torch.Tensor:
    """Return `torch.nn.functional.cross_entropy` of logits of which each rank has some, on all.

    The last dim of `logits` is this rank's part of the vocabulary, ranks in order; `targets` are
    the same on all ranks and count in the whole. Costs one all-gather of two numbers for each
    token, three with smoothing; backward sends nothing. Parts may differ in length: their sum is
    `vocabulary`, cut as a plan cuts it, or else ranks ask each other. Logits of 16 bits give a
    loss of 32.
    """
    try:
        logits = _part_of(logits, comm)
        smoothing = _checked(logits, targets, reduction, label_smoothing)
        targets = targets.long()
        start, total = _part(logits.size(-1), comm, vocabulary)
        _refuse_strange(targets, ignore_index, total)
    except InvalidArgumentError:
        _tell_others(comm)
        raise
    kept = targets != ignore_index
    facts = reduction, ignore_index, smoothing, total, digest(targets)
    apply: Any = _CrossEntropy.apply  # Any: torch's is not typed
    rows = logits.reshape(targets.numel(), logits.size(-1))
    losses: torch.Tensor = apply(
        rows, targets.flatten(), kept.flatten(), comm, (start, total), smoothing,
        label_of(f"cross_entropy {facts}"),
    )  # fmt: skip
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / kept.sum()


def _part_of(logits: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return logits as they lie here; refuse what a plan has cut otherwise."""
    if isinstance(logits, CutTensor):
        axis, cut = logits.mark.axis, logits.mark.cut
        strange = cut.dim != -1 or cut.outer != 1 or cut.piece is not None or cut.tokens
        if strange or axis.comm.size != comm.size:
            raise InvalidArgumentError(
                f"cross_entropy takes logits of which each rank has a part of the last dim, and "
                f"their ranks: mesh[{axis.name!r}], of {axis.comm.size}; not {comm.size} ranks, "
                f"and dim {cut.dim}."
            )
    return unmarked(logits)


def _tell_others(comm: Communicator) -> None:
    """Have ranks that wait for this one learn that it has refused what it was given."""
    if comm.size > 1:
        with suppress(CommunicationError):
            comm.all_gather(np.zeros(0), label=label_of("cross_entropy was refused"))


def _checked(logits: torch.Tensor, targets: torch.Tensor, reduction: str, smooth: float) -> float:
    """Refuse what has no meaning; return the smoothing."""
    if reduction not in REDUCTIONS:
        raise InvalidArgumentError(
            f"reduction of cross_entropy is one of {', '.join(REDUCTIONS)}, not {shown(reduction)}."
        )
    if not logits.is_floating_point() or targets.is_floating_point() or targets.is_complex():
        raise InvalidArgumentError(
            f"cross_entropy needs logits that are floating and targets that are token numbers, not "
            f"{logits.dtype} and {targets.dtype}; probabilities as targets are not taken."
        )
    if logits.dim() < 1 or logits.shape[:-1] != targets.shape:
        raise InvalidArgumentError(
            f"cross_entropy needs a target for each row of logits, with the vocabulary as last "
            f"dim; logits are {tuple(logits.shape)} and targets {tuple(targets.shape)}."
        )
    smoothing = number("label_smoothing", smooth)
    if not 0 <= smoothing <= 1:
        raise InvalidArgumentError(f"label_smoothing is from 0 to 1, not {shown(smooth)}.")
    return smoothing


def _part(here: int, comm: Communicator, vocabulary: int | None) -> tuple[int, int]:
    """Return where this rank's part of the vocabulary starts, and how long the whole is."""
    if vocabulary is None:
        counts = comm.all_gather(np.array([here])).ravel().tolist()
        return sum(counts[: comm.rank]), sum(counts)
    total = index_of(vocabulary) or 0
    each, more = divmod(total, comm.size)
    if here != each + (comm.rank < more):
        raise InvalidArgumentError(
            f"cross_entropy: of a vocabulary of {shown(vocabulary)} rank {comm.rank} of "
            f"{comm.size} has {each + (comm.rank < more)} logits, not {here}."
        )
    return comm.rank * each + min(comm.rank, more), total


def _refuse_strange(targets: torch.Tensor, ignore_index: int, total: int) -> None:
    """Refuse a target that is no token and is not left out."""
    outside = ((targets < 0) | (targets >= total)) & (targets != ignore_index)
    if bool(outside.any()):
        raise InvalidArgumentError(
            f"cross_entropy: target {int(targets[outside][0])} is outside of the vocabulary of "
            f"{total}, and not ignore_index, {ignore_index}."
        )


def _everyone(mine: torch.Tensor, comm: Communicator, label: int) -> torch.Tensor:
    """Return what all ranks have, if they were asked for the same."""
    if comm.size == 1:
        return mine[None]
    try:
        return comm.all_gather(mine, label=label)
    except CollectiveMismatch as error:
        raise CollectiveMismatch(
            f"{error}\nThis rank was in cross_entropy, where labels stand for targets, reduction, "
            f"ignore_index, label_smoothing and vocabulary: give all ranks the same, of which none "
            f"is refused."
        ) from None


def _refuse_whole(every: torch.Tensor, x: torch.Tensor) -> None:
    """Refuse logits that are the same on all ranks: a vocabulary that was gathered already."""
    sums = every[:, 0]
    if len(sums) > 1 and x.numel() and bool((sums == sums[0]).all()) and bool((x != x[0, 0]).any()):
        raise InvalidArgumentError(
            f"cross_entropy takes logits of which every rank has its own part, and all "
            f"{len(sums)} ranks have the same {x.size(1)} for each token. Of logits that are "
            f"whole, as 'column gather' leaves them, take torch.nn.functional.cross_entropy."
        )


class _CrossEntropy(torch.autograd.Function):
    """The loss of every token: log Σ exp x - (1 - ε) x[target] - ε/V Σ x, and 0 if left out."""

    @staticmethod
    def forward(
        ctx: Any,  # Any: torch's
        logits: torch.Tensor,
        targets: torch.Tensor,
        kept: torch.Tensor,
        comm: Communicator,
        part: tuple[int, int],
        smoothing: float,
        label: int,
    ) -> torch.Tensor:
        ctx.crossing, ctx.comm = "cross_entropy", comm
        ctx.watch, ctx.number = whole_gradients_of(comm), number_of(comm)
        start, total = part
        here = kept & (targets >= start) & (targets < start + logits.size(1))
        column = (targets - start).masked_fill(~here, 0)
        dtype = torch.float32 if logits.dtype in HALVES else logits.dtype
        x = logits.to(dtype)
        said = x.gather(1, column[:, None])[:, 0].masked_fill(~here, 0) if x.size(1) else x.sum(1)
        parts = [x.logsumexp(1), said]
        if smoothing:
            parts.append(x.sum(1))
        every = _everyone(torch.stack(parts), comm, label)
        _refuse_whole(every, x)
        log_sum, said, *sums = every[:, 0].logsumexp(0), *every[:, 1:].sum(0)
        loss = log_sum - (1 - smoothing) * said
        if smoothing:
            loss = loss - smoothing / total * sums[0]
        ctx.save_for_backward(logits, log_sum, column, here, kept)
        ctx.smoothing, ctx.total = smoothing, total
        result: torch.Tensor = loss.masked_fill(~kept, 0)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # what was saved depends on other ranks' logits, too
            raise InvalidArgumentError(
                "rd.cross_entropy has no second derivative: leave out create_graph=True, or gather "
                "the logits ('column gather' in the plan) and take torch's."
            )
        if ctx.watch is not None:
            ctx.watch.note_output("rd.cross_entropy()", ctx.number, grads[0])
        logits, log_sum, column, here, kept = ctx.saved_tensors
        grad = (logits.to(log_sum.dtype) - log_sum[:, None]).exp_()
        if ctx.smoothing:
            grad -= ctx.smoothing / ctx.total
        if grad.size(1):
            grad.scatter_add_(1, column[:, None], (here.to(grad) * (ctx.smoothing - 1))[:, None])
        grad = grad.mul_(grads[0][:, None]).masked_fill_(~kept[:, None], 0)
        return grad.to(logits.dtype), *[None] * 6
