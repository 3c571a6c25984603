"""Gradients of experts that do not come with tokens: of a penalty on weights, for example.

Tokens of all ranks come to an expert, and its gradient is of the sum of their losses. What is
computed from the expert itself is in the loss of the one rank that has it, where one device has it
in a loss that is the mean of all. So it counts as if it was in the loss of every rank.
"""

from __future__ import annotations

from typing import Any

import torch

from roundelay.parallel.sharding import sharding_of

__all__ = ["by_ranks", "count_whole", "through_dispatch"]

COUNTED = "counts_whole"  # of a parameter: what has its direct gradients count so


def count_whole(parameter: torch.Tensor) -> None:
    """Have the gradients of an expert multiplied by the ranks; those of tokens are divided by it.

    Autograd adds both up before anybody sees them, so that they can't be told apart there.
    """
    sharding, own = sharding_of(parameter), vars(parameter)
    if sharding is None or sharding.comm.size == 1 or COUNTED in own:
        return
    if parameter.requires_grad:
        size = sharding.comm.size
        hook: Any = parameter.register_hook(lambda grad: grad * size)  # type: ignore[no-untyped-call]
        own[COUNTED] = hook


def through_dispatch(parameter: torch.Tensor) -> torch.Tensor:
    """Return an expert's parameter for use on the tokens of all ranks."""
    count_whole(parameter)
    sharding = sharding_of(parameter)
    if COUNTED not in vars(parameter) or sharding is None:
        return parameter
    return by_ranks(parameter, sharding.comm.size)


def by_ranks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return a tensor as it is; its gradients are divided by the ranks."""
    used: torch.Tensor = _ByRanks.apply(x, size)  # type: ignore[no-untyped-call]
    return used


class _ByRanks(torch.autograd.Function):
    """A parameter as it is; its gradients divided by what `count_whole` multiplies them with."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:  # Any: torch's
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / ctx.size, None
