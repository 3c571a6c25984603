"""Gradients that a rank has whole: in `.grad` of the parameters, or waiting for master weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.training._grad_edits import GradEdits
from roundelay.training.optimizer.masters import Masters
from roundelay.training.strategy import Only, StrategyState, chosen

__all__ = ["WholeGradients", "clamp", "drop", "norm_of", "scale"]

ALONE = 2  # references to what nobody holds but who asks for their number


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
        if self.setup.comm.size > 1:
            names = [parameter.name for parameter in self.setup.parameters]
            self._edits = self._edits or GradEdits(self._tensors, names, self.setup.experts)
            self._edits.note(only)

    def done_to_grads(self, only: Only = None) -> list[str]:
        """Say which are no longer so."""
        return [] if self._edits is None else self._edits.found(only)

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
