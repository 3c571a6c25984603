"""Gradients that a rank has whole: in `.grad` of the parameters, or waiting for master weights."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import nan
from types import MappingProxyType
from typing import Any, TypeGuard

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.training._refused_grad import RefusedGrad
from roundelay.training._step import ALIKE
from roundelay.training.optimizer.masters import Masters
from roundelay.training.shards.operands import digest
from roundelay.training.strategy import Only, StrategyState, chosen

ALONE = 2  # references to what nobody holds but who asks for their number
FEW = 4  # changed gradients that are looked at whole
MOST = 1024  # elements that are looked at of each of more, as whoever clips changes all of them
SOME = 16  # gradients that are told by name


class WholeGradients(StrategyState):
    """What strategies have in common in which every rank steps on whole parameters."""

    _masters: Masters | None
    _tensors: list[torch.nn.Parameter]
    _edits: GradEdits | None = None
    #: Gradients that the user has seen, in memory that the next ones come to.
    _lent: Mapping[int, torch.Tensor] = MappingProxyType({})

    def before_step(self, only: Only = None) -> None:
        """Bring the gradients to the master weights, if there are any."""
        del only
        if self._masters is not None:
            self._masters.ready()

    def broke_step(self, only: Only = None) -> None:
        """Round the masters into the model."""
        if self._masters is not None:
            self._masters.hand_out(only)

    def _take_back(self) -> None:
        """Have the memory of gradients for ourselves: whoever kept one keeps the values it had."""
        lent, self._lent = dict(self._lent), {}
        while lent:
            index, grad = lent.popitem()
            if self._tensors[index].grad is not grad and sys.getrefcount(grad) > ALONE:
                grad.data = grad.clone()

    def brought_together(self, only: Only = None) -> None:
        """Remember gradients as they are."""
        step = self.setup.step
        if self.setup.comm.size > 1 or step.beside is not None or step.staged:
            names = [parameter.name for parameter in self.setup.parameters]
            self._edits = self._edits or GradEdits(
                self._tensors, names, self.setup.experts, step.divided, staged=step.staged
            )
            self._edits.note(only)

    def done_to_grads(self, only: Only = None) -> list[tuple[str, str]]:
        """Say which are no longer so."""
        if self._edits is None:
            return []
        for index, factor in self._edits.factors(only):
            self.setup.step.scales(index, factor)
        return self._edits.found(only)

    def after_step(self, only: Only = None) -> None:
        """Round the masters that were stepped on into the model."""
        if self._masters is not None:
            self._masters.hand_out(only)
        super().after_step(only)

    def forget(self, only: Only = None) -> None:
        """Let go of gradients."""
        if self._masters is not None:
            self._masters.forget(only)
        else:
            drop(self._tensors, only)

    def zero_grad(self, own: Any, *, set_to_none: bool, only: Only = None) -> None:
        """Forget gradients, or make them zero."""
        if self._masters is not None and not set_to_none:
            self._masters.zero(only)
        else:
            super().zero_grad(own, set_to_none=set_to_none, only=only)

    def stepped_on(self) -> dict[str, torch.Tensor]:
        """Return the gradients that the optimizer gets, by name: those of masters, unscaled."""
        self.before_step()
        return {parameter.name: tensor.grad
                for parameter, tensor in zip(self.setup.parameters, self._live, strict=True)
                if tensor.grad is not None}  # fmt: skip

    def grad_norm(self, norm_type: float, only: Only = None) -> float:
        """Return the norm of gradients that every rank has whole."""
        if self._masters is not None:
            self._masters.ready()
        return norm_of(self._live, norm_type, only)

    def clamp_grads(self, value: float, only: Only = None) -> None:
        """Cut every element."""
        if self._masters is not None:
            self._masters.ready()
        clamp(self._live, value, only)

    def scale_grads(self, factor: float, only: Only = None) -> None:
        """Multiply, now or when the gradients get to the masters."""
        if self._masters is not None:
            self._masters.scale(factor, only)
        else:
            scale(self._tensors, factor, only)

    def take_edits(self) -> None:
        """Bring what the user has written into the model to the masters."""
        if self._masters is not None:
            self._masters.take_edits()

    def loaded(self, index: int, values: torch.Tensor) -> None:
        """Bring what was loaded to the master, unrounded."""
        if self._masters is not None:
            self._masters.load(index, values)

    def refresh(self) -> None:
        """Bring weights that were read to the model, from the masters if there are some."""
        super().refresh()
        if self._masters is not None:
            self._masters.note()

    @property
    def _live(self) -> Sequence[torch.Tensor]:
        """The tensors whose gradients the optimizer sees."""
        return self._tensors if self._masters is None else self._masters.tensors


def norm_of(tensors: Sequence[torch.Tensor], norm_type: float, only: Only = None) -> float:
    """Return the norm of whole gradients."""
    grads = [_values(tensor.grad) for tensor in chosen(tensors, only) if tensor.grad is not None]
    return float(torch.nn.utils.get_total_norm(grads, norm_type))


def clamp(tensors: Sequence[torch.Tensor], value: float, only: Only = None) -> None:
    """Cut every element of whole gradients."""
    for tensor in chosen(tensors, only):
        if tensor.grad is not None and tensor.grad.is_complex():
            raise InvalidArgumentError("clip_grad_value_ can't cut complex gradients; clip norms.")
        if tensor.grad is not None:
            if tensor.grad.is_sparse:
                tensor.grad = tensor.grad.coalesce()  # or one element would be cut in parts
            _values(tensor.grad).clamp_(-value, value)


def scale(tensors: Sequence[torch.Tensor], factor: float, only: Only = None) -> None:
    """Multiply whole gradients."""
    for tensor in chosen(tensors, only):
        if tensor.grad is not None:
            tensor.grad.mul_(factor)


def _values(grad: torch.Tensor) -> torch.Tensor:
    """Return all elements that are not zero by themselves."""
    return grad.coalesce().values() if grad.is_sparse else grad


def drop(tensors: Sequence[torch.Tensor], only: Only = None) -> None:
    """Let go of whole gradients."""
    for tensor in chosen(tensors, only):
        tensor.grad = None


class GradEdits:
    """The gradients of some parameters, as they were when the ranks brought them together.

    What a user does to them until the step, all ranks must do alike.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        names: Sequence[str],
        but: Collection[int] = (),
        divided: Collection[str] = (),
        *,
        staged: bool = False,
    ) -> None:
        """Look at all of them but those of which every rank has others."""
        self._tensors, self._names, self._but, self._divided = tensors, names, but, divided
        self._seen: list[tuple[int, ...]] = [()] * len(tensors)
        #: In a stage of a pipeline: elements of each, by which it tells what multiplied it.
        self._some: dict[int, torch.Tensor] | None = {} if staged else None

    def note(self, only: Collection[int] | None = None) -> None:
        """Take them as they are now for what they should be."""
        for index in range(len(self._tensors)) if only is None else only:
            grad = self._tensors[index].grad
            self._seen[index] = _mark(grad)
            if self._some is not None and _sampled(grad) and self._seen[index]:
                self._some[index] = _sample(grad)

    def factors(self, only: Collection[int] | None = None) -> Iterator[tuple[int, float]]:
        """Say by what gradients were multiplied since, where stages compare it; nan if unknown."""
        for index, before in (self._some or {}).items():
            grad = self._tensors[index].grad
            if not _sampled(grad) or _mark(grad) in ((), self._seen[index]):
                continue
            if only is None or index in only:
                by = (_sample(grad) / before)[before != 0]
                least, most = (float(by.min()), float(by.max())) if by.numel() else (nan, nan)
                yield index, most if most - least <= ALIKE * most else nan

    def found(self, only: Collection[int] | None = None) -> list[tuple[str, str]]:
        """Say what was done to them since; gradients that are alike are said alike.

        Once for ranks with other data, and once for those that have other parts of the model.
        """
        changed = [
            index
            for index, (tensor, seen) in enumerate(zip(self._tensors, self._seen, strict=True))
            if _mark(tensor.grad) != seen
            and (only is None or index in only)
            and index not in self._but
        ]
        if not changed:
            return []
        gone = [self._names[index] for index in changed if self._tensors[index].grad is None]
        there = [index for index in changed if self._tensors[index].grad is not None]
        found = (self._tensors[index].grad for index in there)
        numbers = _numbers([one for one in found if one is not None])
        marks = [(self._names[index], f" {number:08x}")
                 for index, number in zip(there, numbers, strict=True)]  # fmt: skip
        self._refuse_parts(there)
        told = _listed([name + mark for name, mark in marks])
        shared = _listed([name + mark * (name not in self._divided) for name, mark in marks])
        lost = [(what, what) for what in (f"the gradient of {name} let go" for name in gone)]
        return [(told, shared), *lost] if there else lost

    def _refuse_parts(self, changed: Collection[int]) -> None:
        """Refuse changes that nothing on other ranks can be compared with: of parts alone."""
        if len(changed) < len(self._tensors) or {*self._names} - {*self._divided}:
            return
        raise InvalidArgumentError(
            f"All gradients were changed since the backward pass, and of every one this rank has "
            f"a part only: of {self._names[0]}, say. A norm or a mean of .grad is of the parts "
            f"here, and other ranks have others. Use optimizer.clip_grad_norm_ or "
            f"optimizer.clip_grad_value_, which see all of them."
        )


def _sampled(grad: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Say whether there is a gradient to be looked at: not one that is kept for master weights."""
    return grad is not None and not isinstance(grad, RefusedGrad)


def _sample(grad: torch.Tensor) -> torch.Tensor:
    """Return a few elements, as numbers to divide."""
    flat = grad.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SOME)].abs().double().cpu()


def _listed(marks: Sequence[str]) -> str:
    named = ", ".join(marks[:: max(1, -(-len(marks) // SOME))])
    every = f", all {zlib.crc32(' '.join(marks).encode()):08x}" if len(marks) > SOME else ""
    return f"{len(marks)} gradients changed: {named}{every}"


def _mark(grad: torch.Tensor | None) -> tuple[int, ...]:
    """Return what changes when a gradient is written into, or another one is put in its place."""
    if grad is None or grad.layout != torch.strided:
        return ()
    return id(grad), grad._version, grad.data_ptr()  # noqa: SLF001 - autograd's


def _numbers(grads: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each; of many gradients some elements are looked at, at one stroke."""
    if len(grads) <= FEW or any(grad.layout != torch.strided for grad in grads):
        return [digest(grad) for grad in grads]
    flats = [grad.detach().reshape(-1) for grad in grads]
    some = [flat[:: max(1, flat.numel() // MOST)] for flat in flats]
    rows = torch.cat(some).cpu().split_with_sizes([len(one) for one in some])
    return [zlib.crc32(row.view(torch.uint8).numpy().tobytes()) for row in rows]
