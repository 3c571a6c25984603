"""Adasum: the sum of gradients that point apart, the mean of gradients that point the same way."""

from __future__ import annotations

import torch

from roundelay.communicator import Communicator

__all__ = ["adasum"]


def adasum(comm: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """Combine the tensors of 2, 4, 8 … ranks: of pairs, of pairs of pairs …; log2(N) exchanges."""
    mine = tensor.clone()
    distance = 1
    while distance < comm.size:
        other = comm.rank ^ distance
        theirs = comm.sendrecv(mine, other, torch.empty_like(mine), other)
        # The lower rank's comes first for both, so that both have the same bits.
        mine = _combined(mine, theirs) if comm.rank < other else _combined(theirs, mine)
        distance *= 2
    return mine


def _combined(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return both, each less half of what it has of the other.

    >>> _combined(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]))
    tensor([1., 2.])
    >>> _combined(torch.tensor([3.0]), torch.tensor([3.0]))
    tensor([3.])
    """
    x, y = one.double().flatten(), other.double().flatten()
    common, x_norm, y_norm = x @ y, x @ x, y @ y
    x_part = 1 - common / (2 * x_norm) if x_norm else torch.ones(())
    y_part = 1 - common / (2 * y_norm) if y_norm else torch.ones(())
    return (x_part * x + y_part * y).to(one.dtype).view_as(one)
