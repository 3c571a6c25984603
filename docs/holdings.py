"""Pictures of who holds what, measured: a small model trains, and its ledger is drawn."""

from __future__ import annotations

import copy
from typing import Any

import torch

import roundelay as rd
from roundelay.view.holdings import Bar, holdings

__all__ = ["mixed_precision"]

RANKS = 4
WAYS = [
    ("fp32", "ddp"), ("bf16", "ddp"), ("bf16", "zero1"), ("bf16", "zero2"), ("bf16", "zero3"),
]  # fmt: skip


def mixed_precision() -> str:
    """Return the picture of what one of four ranks holds for each parameter, with Adam."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
    count = sum(one.numel() for one in model.parameters())
    bars = [
        Bar(f"{precision}, {strategy}", _held(model, precision, strategy, count))
        for precision, strategy in WAYS
    ]
    title = f"What each of {RANKS} ranks holds with Adam"
    return holdings(bars, title=title, unit="bytes per parameter of the model, as measured")


def _held(model: torch.nn.Module, precision: str, strategy: str, count: int) -> dict[str, float]:
    def train(comm: rd.Communicator) -> Any:
        mine = copy.deepcopy(model)
        mine, optimizer = rd.prepare(
            mine, torch.optim.Adam(mine.parameters()), comm=comm, strategy=strategy,
            precision=precision,
        )  # fmt: skip
        mine(torch.ones(1, 64)).float().sum().backward()
        optimizer.step()
        masters = 0 if precision == "fp32" else 4 / (1 if strategy == "ddp" else comm.size)
        return rd.ledger(mine).entries[0].measured, masters

    held, masters = rd.run(train, RANKS, "threads")[0]
    return {
        "parameters": held.parameters / count,
        "gradients": held.gradients / count,
        "master weights": masters,
        "Adam's two moments": held.optimizer / count - masters,
    }


if __name__ == "__main__":
    import sys

    sys.stdout.write(mixed_precision())
