"""The picture of a training step holds and sends what `rd.ledger` predicts and measures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

import roundelay as rd
from roundelay.communicator import Communicator
from roundelay.training.ledger import Entry
from roundelay.view.training_step import (
    STRATEGY_NAMES,
    StepChoices,
    TrainingStep,
    training_step,
)

LAYERS, BUCKETS, WIDTH, STEPS = 4, 2, 64, 3
BESIDES = 4096  # bytes of a step that are no gradients or parameters: what ranks tell each other


class Layer(torch.nn.Module):
    """As many parameters as a layer of the picture."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.mean()


def strategy(choices: StepChoices, step: TrainingStep) -> Any:
    item = step.sizes.width.gradient if choices.strategy == "ddp" else 4
    bucket = LAYERS // BUCKETS * step.sizes.unit * item
    if choices.strategy == "ddp":
        return rd.Ddp(bucket_bytes=bucket)
    if choices.divided:
        stage = int(choices.strategy[-1])
        return rd.Zero(3) if stage == 3 else rd.Zero(stage, bucket_bytes=bucket)
    return choices.strategy


def train(comm: Communicator, choices: StepChoices) -> list[Entry]:
    step = training_step(choices)
    model = torch.nn.Sequential(*(Layer(step.sizes.unit) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = rd.prepare(model, optimizer, strategy=strategy(choices, step),
                                  precision=choices.precision, comm=comm)  # fmt: skip
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    return list(rd.ledger(model).entries)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", STRATEGY_NAMES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_picture_is_the_ledger(name: str, ranks: int, precision: str) -> None:
    choices = StepChoices(name, ranks=ranks, layers=LAYERS, buckets=BUCKETS, width=WIDTH,
                          precision=precision)  # fmt: skip
    last = training_step(choices).frames[-1]
    rounds = 2 if name in ("ps-async", "ps-ssp") else 1
    for entry in rd.run(train, ranks, engine="threads", args=(choices,))[0]:
        shown = last.held[entry.rank]
        assert (shown.parameters, shown.gradients, shown.optimizer) == (
            entry.predicted.parameters, entry.predicted.gradients, entry.predicted.optimizer,
        )  # fmt: skip
        assert shown.transient == entry.predicted.transient
        assert entry.measured == entry.predicted
        sent = last.sent[entry.rank] / rounds
        assert sent <= entry.sent_predicted <= sent + BESIDES
