"""Gradients of what ranks with parts of one model have whole: each must have the same ones.

Whatever goes another way on one of them shows there: a mask of its own, other rows, a loss of its
part. If nobody looked, weights that should be one would drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import isfinite

import torch

__all__ = ["SharedGradients"]

ALWAYS, EVERY = 8, 8  # passes that are looked at: the first ones, and then some
SAMPLES = 1 << 16  # elements of a gradient that count
#: How much of it a number may differ by, as kernels may round otherwise, by bytes of an element.
ROUNDING = {8: 1e-6, 4: 1e-4}
APART = (
    "The gradient of {name}, which the ranks that have parts of one model in this mesh all have "
    "whole, is another one on rank {other} than on rank {first}, counted along their axes. This "
    "step was not taken. Something is not the same on each: rows, random numbers between cut "
    "layers (F.dropout on ranks with different seeds: take nn.Dropout, and 'dropout' in the plan), "
    "or a loss that looks at this rank's part of something."
)


class SharedGradients:
    """A number for each of these gradients, of some backward passes."""

    def __init__(self, names: Sequence[str], divided: frozenset[str]) -> None:
        self._names = names
        self._looked_at = [name not in divided for name in names]
        self._found: dict[int, tuple[torch.Tensor, float]] = {}
        self._passes = 0

    def note(self, index: int, grad: torch.Tensor) -> None:
        """Look at a gradient that has come."""
        due = self._passes < ALWAYS or self._passes % EVERY == 0
        if due and self._looked_at[index] and grad.layout is torch.strided and grad.numel():
            self._found[index] = _number_of(grad), ROUNDING.get(grad.itemsize, 3e-2)

    def numbers(self) -> list[float]:
        """Return what ranks add up: one number for all, its square, and how much it may be off."""
        values = self._values()
        total = allowed = 0.0
        for index, value in values.items():
            weight = 1 + index % 7  # so that two that change places are seen
            total += weight * value
            allowed += weight * abs(value) * self._found[index][1]
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
        """Return the number of each, and how much it may be off."""
        return {self._names[index]: (value, self._found[index][1])
                for index, value in self._values().items()}  # fmt: skip

    @staticmethod
    def apart(every: Sequence[dict[str, tuple[float, float]]]) -> str:
        """Say which is the first that ranks have otherwise; nothing if none is."""
        names = [*dict.fromkeys(name for one in every for name in one)]
        for name in names:
            values = [one.get(name, (0.0, 0.0)) for one in every]
            off = [abs(value - values[0][0]) > allowed * abs(value) for value, allowed in values]
            if any(off):
                return APART.format(name=name, first=0, other=off.index(True))
        return ""

    def _values(self) -> dict[int, float]:
        if not self._found:
            return {}
        values = torch.stack([value.double() for value, _ in self._found.values()]).tolist()
        return dict(zip(self._found, values, strict=True))


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
