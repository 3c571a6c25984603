"""What the ranks tell one another at the end of every backward pass.

One small all-reduce: which parameters got a gradient on any rank, which got one that is not finite,
and how much the losses weigh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError, NotFiniteError
from roundelay.reductions import Array
from roundelay.training._setup import Parameter, Weights

__all__ = ["Told", "finite", "refuse_broken", "tell_all"]


class Told:
    """What all ranks together know of a backward pass."""

    def __init__(self, numbers: Array, count: int, size: int) -> None:
        self.used = numbers[:count] > 0
        self.broken = numbers[count : 2 * count] > 0
        self.weight = float(numbers[-2])
        self.weighed = float(numbers[-1])  # how many ranks used `rd.backward`
        self._size = size

    def factor(self) -> float | None:
        """Return what a sum over ranks must be multiplied with; None where the mean is meant."""
        if self.weighed == 0:
            return None
        if self.weighed != self._size:
            raise InvalidArgumentError(
                f"{self.weighed:.0f} of {self._size} ranks used rd.backward(…, weight=…) in this "
                f"step, the others loss.backward(). Use one of them on every rank."
            )
        if self.weight == 0:
            raise InvalidArgumentError("All weights of this step are 0, so there is no mean.")
        return 1 / self.weight


def tell_all(
    comm: Communicator,
    used: Iterable[bool],
    broken: Iterable[bool],
    weights: Weights,
) -> Told:
    """Bring what this rank knows together with what the others do."""
    flags = [float(one) for one in used]
    bad = [float(one) for one in broken]
    numbers = np.array([*flags, *bad, weights.total, float(weights.used)])
    comm.all_reduce(numbers)
    return Told(numbers, len(flags), comm.size)


def refuse_broken(
    comm: Communicator, told: Told, mine: Iterable[bool], parameters: list[Parameter]
) -> None:
    """Raise on every rank if a gradient is not finite, naming the parameters and the ranks."""
    if not told.broken.any():
        return
    every = comm.all_gather(np.array([float(any(mine))]))[:, 0]
    ranks = [rank for rank, one in enumerate(every) if one]
    names = [parameters[index].name for index in np.flatnonzero(told.broken)]
    raise NotFiniteError(names, ranks)


def finite(tensor: torch.Tensor) -> bool:
    """Tell whether all elements are finite; a sum that overflows is looked at again."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())
