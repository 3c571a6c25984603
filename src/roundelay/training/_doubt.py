"""Which elements of one device's gradients are rounding: another machine has others there.

Adam makes a step of full length of them, so that weights differ where nobody is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from roundelay.training.precision import cast_to, master_dtype

__all__ = ["DoubleCheck", "last_digit", "small_beside", "sure_of", "unlike", "widened"]

#: Below what, in last digits of the largest gradient, an element is so small that its sign may be
#: rounding; and in 16 bits, in what rounding was seen to do to gradients of the same parameter:
#: about what verify compares to, as Adam's later steps are off by as much of their length.
DIGITS, TIMES = 640, 32

Gradients = Mapping[str, torch.Tensor]
Masks = dict[str, torch.Tensor]


def last_digit(gradients: Gradients) -> float:
    """Return the last digit of the largest element of all gradients."""
    grads = [grad for grad in gradients.values() if grad.numel()]
    largest = max((float(grad.abs().max()) for grad in grads), default=0.0)
    return largest * max((torch.finfo(grad.dtype).eps for grad in grads), default=0.0)


def small_beside(gradients: Gradients) -> Masks:
    """Return which elements are small beside the largest of the model."""
    bound = DIGITS * last_digit(gradients)
    return {name: _at_most(bound, grad) for name, grad in gradients.items()}


def unlike(gradients: Gradients, exact: Gradients) -> Masks:
    """Return which are small beside what rounding has made of gradients of their parameter."""
    found = {}
    for name, grad in gradients.items():
        if name in exact:
            off = grad.double() - exact[name].double()
            seen = off[(grad != 0) | (exact[name] != 0)]  # rows that were used, of an embedding
            noise = float(seen.square().mean().sqrt()) if seen.numel() else 0.0
            found[name] = _at_most(TIMES * noise, grad)
    return found


def _at_most(bound: float, grad: torch.Tensor) -> torch.Tensor:
    size = grad.abs()
    small = size <= bound
    if not small.all() or not size.any():  # what is zero beside others is no rounding
        small &= size > 0
    return small


def widened(doubtful: Masks, more: Masks) -> None:
    """Add elements to those that are doubtful already, of which a step was made."""
    for name, small in more.items():
        doubtful[name] = doubtful[name] | small if name in doubtful else small


def sure_of(
    found: torch.Tensor, expected: torch.Tensor, doubtful: torch.Tensor | None
) -> torch.Tensor:
    """Return a parameter without what nobody can tell of it."""
    if doubtful is None or not bool(doubtful.any()):
        return found
    return torch.where(doubtful.to(found.device), expected.to(found), found)


class DoubleCheck:
    """A model in its own dtype, beside one that computes in 16 bits with the same weights.

    What only one of them has in a gradient is rounding. It costs one more pass in each step.
    """

    def __init__(self, model: torch.nn.Module, compute: torch.dtype) -> None:
        self._model = copy.deepcopy(model)
        own = [each for each in self._model.parameters() if each.is_floating_point()]
        with torch.no_grad():
            for parameter in own:
                parameter.data = parameter.data.to(master_dtype(parameter.dtype))
        wide = own[0].dtype if own else torch.float32
        rounded = partial(_rounded, compute, wide)
        self._model.register_forward_pre_hook(rounded, with_kwargs=True)
        self._devices = {each.device for each in own if each.device.type != "cpu"}

    def gradients(
        self,
        half: torch.nn.Module,
        loss: Callable[..., torch.Tensor],
        batch: Sequence[torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Return those of the weights that the other one has, before it is called itself."""
        self._model.load_state_dict(half.state_dict())
        self._model.zero_grad()
        # The other one draws the same random numbers.
        with torch.random.fork_rng([*self._devices]):
            try:
                loss(self._model, *batch).backward()  # type: ignore[no-untyped-call]
            except RuntimeError:  # a loss that takes 16 bits only: then nothing is known
                return {}
        return {name: one.grad for name, one in self._model.named_parameters()
                if one.grad is not None}  # fmt: skip


def _rounded(
    compute: torch.dtype,
    wide: torch.dtype,
    _: torch.nn.Module,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the model what the other one gets."""
    half = cast_to((args, options), compute)
    found: tuple[tuple[Any, ...], dict[str, Any]] = cast_to(half, wide)
    return found
