"""ZeRO steps optimizers that treat elements by themselves at their speed, in any precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch

nn = torch.nn

NAMES = ["zero1", "zero2", "zero3"]


# ---- optimizers

ELEMENTWISE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"amsgrad": True}, "AdamW": {}, "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {}, "Adamax": {}, "NAdam": {}, "RAdam": {}, "Rprop": {}, "ASGD": {}, "Adadelta": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_every_elementwise_optimizer_is_ddp_s_bit_for_bit(stacks: Any, kind: str) -> None:
    model = stacks.make(stacks.Stack)

    def optimizer(mine: Any) -> Any:
        return getattr(torch.optim, kind)(mine.parameters(), **ELEMENTWISE[kind])

    expected = stacks.trained("ddp", 3, model, optimizer=optimizer)
    for name in NAMES:
        stacks.assert_same(stacks.trained(name, 3, model, optimizer=optimizer), expected)


WHOLE: dict[str, dict[str, Any]] = {
    "Adafactor": {"lr": 0.1}, "Muon": {"lr": 0.1, "momentum": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("size", [2, 4])
def test_optimizers_that_need_whole_parameters_get_them(stacks: Any, kind: str, size: int) -> None:
    """Bit for bit as DDP, also with more ranks than parameters in a unit."""
    widths = [4, 6, 5, 3]
    model = stacks.make(lambda: nn.Sequential(*map(nn.Linear, widths, widths[1:], [False] * 3)))

    def optimizer(mine: Any) -> Any:
        return getattr(torch.optim, kind)(mine.parameters(), **WHOLE[kind])

    expected = stacks.trained("ddp", size, model, optimizer=optimizer)
    for name in NAMES:
        stacks.assert_same(stacks.trained(name, size, model, optimizer=optimizer), expected)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_state_and_schedulers_go_along(stacks: Any, name: str, size: int) -> None:
    """Train alone, then together: as if alone all the time."""
    model = stacks.make(stacks.Gained, torch.float64)

    def start(mine: Any) -> tuple[Any, Any]:
        own = torch.optim.AdamW(mine.parameters(), lr=1e-2, amsgrad=True)
        return own, torch.optim.lr_scheduler.ExponentialLR(own, 0.8)

    def train(comm: Any, mine: Any, own: Any, schedule: Any, steps: range) -> None:
        for step in steps:
            stacks.loss_on(comm, mine, step, torch.float64).backward()
            own.step()
            own.zero_grad()
            schedule.step()

    alone = copy.deepcopy(model)
    train(stacks.Alone, alone, *start(alone), range(6))

    def be_rank(comm: Any) -> dict[str, Any]:
        mine = copy.deepcopy(model)
        own, schedule = start(mine)
        train(stacks.Alone, mine, own, schedule, range(3))
        mine, own = rd.prepare(mine, own, strategy=name, comm=comm)
        train(comm, mine, own, schedule, range(3, 6))
        return {key: one.detach().clone() for key, one in rd.full_state_dict(mine).items()}

    for found in rd.run(be_rank, size, "threads"):
        for key, one in alone.state_dict().items():
            assert (found[key] - one).abs().max() <= 1e-12 * one.abs().max(), key


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_ddp_s_bit_for_bit(stacks: Any, name: str, precision: str) -> None:
    model = stacks.make(stacks.Stack)
    expected = stacks.trained("ddp", 3, model, precision=precision, steps=4)
    stacks.assert_same(stacks.trained(name, 3, model, precision=precision, steps=4), expected)
