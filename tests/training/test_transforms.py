"""torch.func, and parameters made of parameters: as on one device, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import InvalidArgumentError  # noqa: E402

nn = torch.nn
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "ps")
START = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
ROWS = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)


def by_rows(model: Any) -> Any:
    return torch.func.jvp(model, (ROWS,), (torch.ones_like(ROWS),))[1].sum()


def by_parameters(model: Any) -> Any:
    own = {name: one.detach() for name, one in model.named_parameters()}
    ones = {name: torch.ones(one.shape, dtype=one.dtype) for name, one in own.items()}
    return torch.func.jvp(lambda given: called(model, given), (own,), (ones,))[1].sum()


def gradient(model: Any) -> Any:
    own = dict(model.named_parameters())
    return torch.func.grad(lambda given: called(model, given).sum())(own)["0.weight"].sum()


def called(model: Any, given: Any) -> Any:
    return torch.func.functional_call(model, given, (ROWS,))


def mapped(model: Any) -> Any:
    return torch.func.vmap(model)(ROWS.view(2, 4, 3)).sum()


def another(model: Any) -> Any:
    return nn.Parameter(model[0].weight).sum()


def detached(model: Any) -> Any:
    model(ROWS).square().mean().backward()
    grad = model[0].weight.grad
    grad.detach_()
    return grad.sum()


ACTS = (by_rows, by_parameters, gradient, mapped, another, detached)
#: What needs whole parameters, which zero3 has inside rd.whole.
WHOLE = (by_rows, by_parameters, gradient, another)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.func's own
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("act", ACTS, ids=lambda one: one.__name__)
def test_it_is_one_devices_or_refused(strategy: str, act: Callable[[Any], Any]) -> None:
    expected = float(act(copy.deepcopy(START)).detach())

    def be_rank(comm: Any) -> None:
        model = copy.deepcopy(START)
        own: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, own = rd.prepare(model, own, strategy=strategy, comm=comm)
        if strategy == "zero3" and act in WHOLE:
            with pytest.raises(InvalidArgumentError, match=r"rd\.whole"):
                act(model)
            with rd.whole(model):
                found = float(act(model).detach())
        else:
            found = float(act(model).detach())
        assert found == pytest.approx(expected, rel=1e-12)
        own.zero_grad()
        model(ROWS).square().mean().backward()  # and training goes on
        own.step()

    # All threads of a process share torch's levels of forward derivatives.
    apart = act in (by_rows, by_parameters)
    rd.run(be_rank, 2, "shared_memory" if apart else "threads")
