"""Optimizers of the user's own, and torch's with hooks and arguments: right, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import InvalidArgumentError  # noqa: E402

nn = torch.nn
ONE_DEVICE = "one device"
SERVERS: dict[str, Any] = {
    "ps by servers": rd.ParameterServer(update="server"),
    "ps-async": "ps-async",
    "ps-ssp": "ps-ssp",
}
HERE: dict[str, Any] = {name: name for name in ("ddp", "zero1", "zero2", "zero3", "ps")}
EVERY = {**HERE, **SERVERS}


def _start() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


START = _start()  # once: random numbers are those of all threads
ROWS = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


def ready(comm: Any, strategy: Any, kind: Any, **options: Any) -> tuple[Any, Any]:
    model = copy.deepcopy(START)
    optimizer = kind(model.parameters())
    if strategy == ONE_DEVICE:
        return model, optimizer
    return rd.prepare(model, optimizer, comm=comm, strategy=strategy, **options)


def weights(model: Any, strategy: Any) -> Any:
    state = model.state_dict() if strategy == ONE_DEVICE else rd.full_state_dict(model)
    return torch.cat([one.detach().double().reshape(-1) for one in state.values()])


class Listing(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """Keeps its parameters, and their momentum, in lists of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.mine = {"all": [one for group in self.param_groups for one in group["params"]]}
        self.momentum = [torch.zeros_like(one) for one in self.mine["all"]]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's
        for one, momentum in zip(self.mine["all"], self.momentum, strict=True):
            one.sub_(momentum.mul_(0.9).add_(one.grad), alpha=self.param_groups[0]["lr"])


class Wrapping(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """Has another optimizer inside, which shares its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def train(comm: Any, strategy: Any, kind: Any, **options: Any) -> Any:
    model, optimizer = ready(comm, strategy, kind, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(ROWS.to(model[0].weight.dtype)).square().mean().backward()
        optimizer.step()
    return weights(model, strategy)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", HERE)
def test_lists_of_an_optimizer_are_right_where_it_steps_on_the_model(name: str, size: int) -> None:
    expected = train(None, ONE_DEVICE, Listing)
    for found in rd.run(lambda comm: train(comm, HERE[name], Listing), size, "threads"):
        assert torch.allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", EVERY)
def test_lists_of_an_optimizer_are_refused_where_it_steps_on_other_tensors(
    name: str, size: int
) -> None:
    def be_rank(comm: Any) -> None:
        for options in [{"precision": "bf16"}, *([{}] if name in SERVERS else [])]:
            with pytest.raises(InvalidArgumentError, match=r"Listing keeps the parameter .* mine"):
                ready(comm, EVERY[name], Listing, **options)

    rd.run(be_rank, size, "threads")


@pytest.mark.parametrize("name", EVERY)
def test_an_optimizer_inside_another(name: str) -> None:
    def be_rank(comm: Any) -> None:
        if name in SERVERS:
            with pytest.raises(InvalidArgumentError, match="in its attribute base"):
                ready(comm, EVERY[name], Wrapping)
            return
        expected = train(None, ONE_DEVICE, Wrapping)
        assert torch.allclose(train(comm, EVERY[name], Wrapping), expected, rtol=1e-12)
        rounded = train(comm, EVERY[name], Wrapping, precision="bf16")
        assert torch.allclose(rounded, expected, atol=0.02)
        assert not torch.allclose(rounded, weights(START, ONE_DEVICE), atol=0.02)

    rd.run(be_rank, 2, "threads")
