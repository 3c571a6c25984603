"""Master weights: what the optimizer steps on while the model computes in half precision.

For strategies in which a rank steps on whole parameters. Gradients stay as they were reduced until
the step, or clipping, needs them in the masters' dtype; after the step those copies go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.parallel.part import marked, part_of
from roundelay.training._refused_grad import RefusedGrad
from roundelay.training._setup import Setup
from roundelay.training.optimizer.joined import JoinedOptimizers
from roundelay.training.precision import cast_model, master_dtype
from roundelay.training.strategy import Only, chosen

__all__ = ["Masters", "make_masters", "merge", "repoint", "written"]

WHY = (
    "The gradient of {0} is kept for the master weights: scaled, or in another dtype than the "
    "parameter. Use optimizer.clip_grad_norm_(…) in place of torch's, and call zero_grad() "
    "before the next backward pass, or put all but the last one into `with rd.accumulate(model)`."
)

LATE = (
    "The gradient of the master weights of {} is made of that of the model at the step. Look at "
    "and change the gradients of model.parameters(), or use optimizer.clip_grad_norm_(…)."
)
BOTH = (
    "Both the parameter {name} and its master weights, in the groups of the optimizer, were "
    "written into since the last step, so that it can't be told which counts. Write into one."
)


class Masters:
    """One master for each trained parameter of a model, and the gradients that wait for it."""

    def __init__(self, setup: Setup, tensors: Sequence[torch.Tensor]) -> None:
        self._setup = setup
        self._halves: list[torch.Tensor] = [one.tensor for one in setup.parameters]
        self.tensors = list(tensors)
        self._waiting: list[torch.Tensor | None] = [None] * len(self.tensors)
        self._factor = 1.0  # what the waiting gradients are still to be multiplied with
        self._ready: set[int] = set()  # masters that have their gradients
        self._seen = self._writes()
        #: What stands in `.grad` of masters until the step.
        self._late = [
            RefusedGrad(master, LATE.format(parameter.name))
            for master, parameter in zip(self.tensors, setup.parameters, strict=True)
        ]

    def note(self) -> None:
        """Take masters and parameters as they are for one another's."""
        self._seen = self._writes()

    def load(self, index: int, values: torch.Tensor) -> None:
        """Take what is being loaded into a parameter, unrounded."""
        self.tensors[index].copy_(values)
        self._seen[index] = written(self.tensors[index]), self._seen[index][1]

    def _writes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Return what changes when somebody writes into a master, or into a parameter."""
        pairs = zip(self.tensors, self._halves, strict=True)
        return [(written(master), written(half)) for master, half in pairs]

    # ---- gradients

    def give(self, grads: Sequence[torch.Tensor | None], *, factor: float | None = None) -> None:
        """Take the gradients of all ranks, one for each parameter, as they were reduced.

        A gradient that is right as it is stays where torch users look for it, in `.grad` of the
        parameter, and may be changed there; any other is out of reach.
        """
        self._waiting = list(grads)
        self._factor = 1.0 if factor is None else factor
        self._ready.clear()
        open_to_all = factor is None and self._setup.scaler is None
        for index, (half, grad) in enumerate(zip(self._halves, self._waiting, strict=True)):
            self.tensors[index].grad = None if grad is None else self._late[index]
            half.grad = grad if grad is None or (open_to_all and grad.dtype == half.dtype) else (
                self._refused(index)
            )  # fmt: skip

    def _refused(self, index: int) -> RefusedGrad:
        return RefusedGrad(self._halves[index], WHY.format(self._setup.parameters[index].name))

    def ready(self) -> None:
        """Bring the gradients to the masters: in their dtype, unscaled, ready for the step."""
        grads = []
        for index, (half, master) in enumerate(zip(self._halves, self.tensors, strict=True)):
            if index in self._ready:
                continue
            self._ready.add(index)
            if master.grad is not None and not isinstance(master.grad, RefusedGrad):
                continue  # the user's own
            grad = self._waiting[index]
            if half.grad is None or not isinstance(half.grad, RefusedGrad):
                grad = half.grad  # the user may have changed it, or taken it away
            master.grad = None if grad is None else grad.to(master.dtype, copy=True)
            if master.grad is not None and grad is self._waiting[index]:
                grads.append(master.grad)  # what the user has set himself counts as it is
        if self._setup.scaler is not None:
            self._setup.scaler.unscale(grads, self._factor)
        elif self._factor != 1.0 and grads:
            torch._foreach_mul_(grads, self._factor)

    def scale(self, factor: float, only: Only = None) -> None:
        """Multiply gradients, now or when they get to the masters."""
        if self._ready or only is not None:
            self.ready()
            for master in chosen(self.tensors, only):
                if master.grad is not None:
                    master.grad.mul_(factor)
            return
        self._factor *= factor
        for index, half in enumerate(self._halves):
            if half.grad is not None and not isinstance(half.grad, RefusedGrad):
                self._waiting[index] = half.grad
                half.grad = self._refused(index)

    def leave(self) -> None:
        """Copy the gradients out of memory that is about to be used for others."""
        for index, grad in enumerate(self._waiting):
            if grad is not None:
                self._waiting[index] = copy = grad.clone()
                if self._halves[index].grad is grad:
                    self._halves[index].grad = copy

    def refuse_more(self) -> None:
        """Refuse a backward pass that would add to gradients that are out of reach."""
        for half in self._halves:
            if isinstance(half.grad, RefusedGrad):
                raise InvalidArgumentError(half.grad.why)

    def forget(self, only: Only = None) -> None:
        """Let go of gradients."""
        for index in self._numbers(only):
            self._waiting[index] = self._halves[index].grad = self.tensors[index].grad = None
            self._ready.discard(index)
        if only is None:
            self._factor = 1.0

    def zero(self, only: Only = None) -> None:
        """Make gradients zero that there are."""
        has = [index for index in self._numbers(only) if self._waiting[index] is not None]
        self.forget(only)
        for index in has:
            half = self._halves[index]
            self._waiting[index] = half.grad = torch.zeros_like(half)

    def _numbers(self, only: Only) -> Sequence[int]:
        return chosen(range(len(self.tensors)), only)

    # ---- weights

    def hand_out(self, only: Only = None) -> None:
        """Round masters into the model, after a step on them."""
        masters = chosen(self.tensors, only)
        self._ready.difference_update(self._numbers(only))
        for master in masters:
            master.grad = None
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(list(chosen(self._halves, only)), list(masters))
        self.note()

    @torch.no_grad()
    def take_edits(self) -> None:
        """Take over what the user has written into the model; the rest keeps its precision.

        What he has written into the masters, by the optimizer's groups, goes into the model.
        """
        pairs = zip(self._halves, self.tensors, self._writes(), self._seen, strict=True)
        for index, (half, master, now, before) in enumerate(pairs):
            if now[0] == before[0] or torch.equal(master.to(half.dtype), half):
                merge(master, half)
            elif now[1] != before[1]:
                name = self._setup.parameters[index].name
                raise InvalidArgumentError(BOTH.format(name=name))
            else:
                half.copy_(master)
        self.note()

    def held(self) -> list[torch.Tensor]:
        """Return the gradients that wait in half precision."""
        return [grad for grad in self._waiting if grad is not None]


def written(tensor: torch.Tensor) -> tuple[int, int]:
    """Return two numbers of which one changes when a tensor is written into."""
    return tensor._version, tensor.data_ptr()  # noqa: SLF001 - autograd's


def merge(master: torch.Tensor, seen: torch.Tensor) -> torch.Tensor | None:
    """Bring elements that were changed in a rounded copy to its master; return where, if any."""
    rounded = master.to(seen.dtype)
    if torch.equal(rounded, seen):
        return None
    where = rounded != seen
    master.copy_(torch.where(where, seen.to(master.dtype), master))
    return where


def make_masters(setup: Setup) -> Masters | None:
    """Cast the model and point its optimizer at masters; None where precision is not mixed.

    The masters are `setup.masters` from then on.
    """
    if not setup.precision.mixed:
        return None
    tensors = [
        parameter.tensor.detach().to(master_dtype(parameter.tensor.dtype), copy=True)
        for parameter in setup.parameters
    ]
    for parameter, master in zip(setup.parameters, tensors, strict=True):
        if (sharding := part_of(parameter.tensor)) is not None:
            marked(master, sharding)
    cast_model(setup.model, setup.precision)
    repoint(setup.optimizer, [parameter.tensor for parameter in setup.parameters], tensors)
    setup.masters = list(tensors)
    return Masters(setup, tensors)


def repoint(
    optimizer: JoinedOptimizers,
    before: Sequence[torch.Tensor],
    after: Sequence[torch.Tensor],
) -> None:
    """Have an optimizer step on other tensors, one for one; options and state go along."""
    other = {id(old): new for old, new in zip(before, after, strict=True)}
    for group in optimizer.param_groups:
        # In place, since some optimizers know the list.
        group["params"][:] = [other.get(id(one), one) for one in group["params"]]
    for old, new in zip(before, after, strict=True):
        if old in optimizer.state:
            optimizer.state[new] = {
                key: value.to(new.dtype) if _goes_with(value, new) else value
                for key, value in optimizer.state.pop(old).items()
            }


def _goes_with(value: object, tensor: torch.Tensor) -> bool:
    """Tell whether a piece of state has an element for each of the tensor's."""
    return (
        isinstance(value, torch.Tensor)
        and value.shape == tensor.shape
        and value.is_floating_point()
    )
