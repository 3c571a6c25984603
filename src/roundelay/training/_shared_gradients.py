"""Gradients of what ranks with parts of one model have whole: each must have the same ones.

Whatever goes another way on one of them shows there: a mask of its own, other rows, a loss of its
part. If nobody looked, weights that should be one would drift apart. What is whole are parameters,
and activations where layers put them together: behind those, gradients of cut layers add up over
ranks, and where the last layer is one of them, no parameter would show that losses differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import isfinite
from typing import NamedTuple
from zlib import crc32

import torch

__all__ = ["SharedGradients"]

_functorch = torch._C._functorch  # noqa: SLF001 - torch has no other name
ALWAYS, EVERY = 8, 8  # passes that are looked at: the first ones, and then some
SAMPLES = 1 << 16  # elements of a gradient that count
#: How much of it a number may differ by, as kernels may round otherwise, by bytes of an element.
ROUNDING = {8: 1e-6, 4: 1e-4}
APART = (
    "The gradient of {name}, which the ranks that have parts of one model in this mesh all have "
    "whole, is another one on rank {other} than on rank {first}, counted along their axes. This "
    "step was not taken. Something is not the same on each: rows, targets, random numbers between "
    "cut layers (F.dropout on ranks with different seeds: take nn.Dropout, and 'dropout' in the "
    "plan), or a loss that looks at this rank's part of something."
)


class _Noted(NamedTuple):
    """What is known of one gradient: a number, its size, and which share of that it may be off."""

    value: torch.Tensor
    size: torch.Tensor
    rounding: float


class SharedGradients:
    """A number for each of these gradients, of some backward passes."""

    def __init__(self, names: Sequence[str], divided: frozenset[str]) -> None:
        self._names = names
        self._looked_at = [name not in divided for name in names]
        #: Of parameters by their index, of activations by the layer that put them together.
        self._found: dict[int | str, _Noted] = {}
        self._passes = 0

    def note(self, index: int, grad: torch.Tensor) -> None:
        """Look at a parameter's gradient that has come."""
        if self._looked_at[index] and self._due(grad):
            value = _number_of(grad)
            self._found[index] = _Noted(value, value.abs(), _rounding(grad))

    def note_output(self, layer: str, number: int, grad: torch.Tensor) -> None:
        """Look at the gradient of what a layer has put together in a numbered forward pass.

        A layer may run in many passes before ranks compare: their numbers add up, each times
        another one, so that two passes that change places are seen, in whatever order they come.
        """
        if not self._due(grad) or _stacked(grad):
            return
        value = _number_of(grad) * (1 + number % 7)
        size, rounding = value.abs(), _rounding(grad)
        before = self._found.get(layer)
        if before is not None:
            value, size = before.value + value, before.size + size
            rounding = max(before.rounding, rounding)
        self._found[layer] = _Noted(value, size, rounding)

    def _due(self, grad: torch.Tensor) -> bool:
        due = self._passes < ALWAYS or self._passes % EVERY == 0
        return due and grad.layout is torch.strided and bool(grad.numel())

    def numbers(self) -> list[float]:
        """Return what ranks add up: one number for all, its square, and how much it may be off."""
        total = allowed = 0.0
        for key, (value, off) in self._values().items():
            # So that two that change places are seen.
            weight = 1 + (crc32(key.encode()) if isinstance(key, str) else key) % 7
            total += weight * value
            allowed += weight * off
        return [total, total * total, allowed]

    def differ(self, ranks: int, sums: Sequence[float]) -> bool:
        """Say whether ranks have different ones, by what they have added up."""
        total, squares, allowed = sums
        apart = (
            ranks * squares - total * total
        )  # of two ranks, the square of by what they are apart
        share = allowed / ranks
        return isfinite(apart) and apart > share * share + 1e-14 * total * total

    def told(self) -> None:
        """Begin another pass."""
        self._passes += 1
        self._found.clear()

    def marks(self) -> dict[str, tuple[float, float]]:
        """Return the number of each, and how much it may be off, once: ranks are about to raise."""
        found = {
            f"what comes out of {key}" if isinstance(key, str) else self._names[key]: value
            for key, value in self._values().items()
        }
        self._found.clear()
        return found

    @staticmethod
    def apart(every: Sequence[dict[str, tuple[float, float]]]) -> str:
        """Say which is the first that ranks have otherwise; nothing if none is."""
        names = [*dict.fromkeys(name for one in every for name in one)]
        for name in names:
            values = [one.get(name, (0.0, 0.0)) for one in every]
            off = [abs(value - values[0][0]) > allowed for value, allowed in values]
            if any(off):
                return APART.format(name=name, first=0, other=off.index(True))
        return ""

    def _values(self) -> dict[int | str, tuple[float, float]]:
        """Return the number of each, and how much it may be off."""
        if not self._found:
            return {}
        ends = [end.double() for one in self._found.values() for end in (one.value, one.size)]
        numbers = iter(torch.stack(ends).tolist())
        return {
            key: (next(numbers), next(numbers) * one.rounding) for key, one in self._found.items()
        }


def _stacked(grad: torch.Tensor) -> bool:
    """Say whether it stands for many gradients at once, as `is_grads_batched=True` makes them."""
    wrapped = _functorch.is_functorch_wrapped_tensor(grad)
    return wrapped or _functorch.is_legacy_batchedtensor(grad)


def _rounding(grad: torch.Tensor) -> float:
    return ROUNDING.get(grad.itemsize, 3e-2)


@torch.no_grad()
def _number_of(grad: torch.Tensor) -> torch.Tensor:
    """Return a number that changes with the elements, and when they change places."""
    flat = (torch.view_as_real(grad) if grad.is_complex() else grad.detach()).reshape(-1)
    flat = flat[:: -(-len(flat) // SAMPLES)]
    wide = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    return wide @ _weights(wide.dtype, wide.device)[: len(wide)]


@cache
def _weights(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.arange(SAMPLES, dtype=torch.float64).mul_(2.4).cos_().to(device, dtype)
