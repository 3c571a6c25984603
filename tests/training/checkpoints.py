"""What tests of checkpoints share: strategies, and a small model."""

from __future__ import annotations

from typing import Any

import torch

import roundelay as rd
from roundelay.training.prepare import known_strategies

STRATEGIES: dict[str, Any] = {
    **known_strategies(),
    "ps by servers": rd.ParameterServer(update="server", servers=2),
    "ps by servers of their own": rd.ParameterServer(update="server", dedicated=True),
}


def small(comm: Any, weight: float) -> tuple[Any, Any]:
    model = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(model.weight, weight)
    torch.nn.init.zeros_(model.bias)
    return rd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
