"""What the programs share: a model, batches, and how losses are told to the last bit."""

from __future__ import annotations

import torch
from torch import nn

STEPS = 5
LINE = "losses "


def model() -> nn.Module:
    """Return a small network, the same on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of one rank and step."""
    made = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 16, generator=made), torch.randn(8, 4, generator=made)


def tell(losses: list[float]) -> None:
    """Print losses where `frameworks.py` looks for them."""
    print(LINE + " ".join(float(loss).hex() for loss in losses), flush=True)
