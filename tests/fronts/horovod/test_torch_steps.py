"""`hvd.DistributedOptimizer` steps only on what was reduced, whatever is done to the optimizer."""

# Some of torch has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roundelay.horovod.torch as hvd
from roundelay.errors import InvalidArgumentError
from roundelay.horovod import run

RANKS, ROWS = 2, 4
X = torch.randn(RANKS * ROWS, 3, generator=torch.Generator().manual_seed(1)).double()
Y = torch.randn(RANKS * ROWS, 2, generator=torch.Generator().manual_seed(2)).double()


def make() -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers = torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
    return torch.nn.Sequential(*layers).double()


def loss_of(model: torch.nn.Module, rows: slice) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(X[rows]), Y[rows])


def same(optimizer: Any) -> Any:
    """Wrap nothing: what one device does."""
    return optimizer


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach() for p in model.parameters()]


# ---- each program runs on one device with all rows, and on ranks with theirs


def by_closure(wrap: Callable[[Any], Any], rows: slice, make_optimizer: Any) -> list[torch.Tensor]:
    model = make()
    optimizer = wrap(make_optimizer(model.parameters()))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        return loss

    for _ in range(3):
        loss = optimizer.step(closure)
    return [*weights(model), loss.detach()]


def closure_sgd(wrap: Callable[[Any], Any], rows: slice) -> list[torch.Tensor]:
    return by_closure(wrap, rows, lambda params: torch.optim.SGD(params, lr=0.1))


def closure_lbfgs(wrap: Callable[[Any], Any], rows: slice) -> list[torch.Tensor]:
    return by_closure(
        wrap, rows, lambda params: torch.optim.LBFGS(params, lr=0.5, line_search_fn="strong_wolfe")
    )


def thawed(wrap: Callable[[Any], Any], rows: slice) -> list[torch.Tensor]:
    model = make()
    model[0].requires_grad_(requires_grad=False)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        if step == 1:
            model[0].requires_grad_(requires_grad=True)
        loss_of(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def added(wrap: Callable[[Any], Any], rows: slice) -> list[torch.Tensor]:
    model = make()
    optimizer = wrap(torch.optim.SGD(model[2].parameters(), lr=0.1))
    optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.05})
    for _ in range(3):
        loss_of(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def copied(wrap: Callable[[Any], Any], rows: slice) -> list[torch.Tensor]:
    model = make()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    found = []
    for _ in range(2):
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            optimizer.step()
        found += weights(model)
        model, optimizer = copy.deepcopy((model, optimizer))
    return found


PROGRAMS: dict[str, Callable[[Callable[[Any], Any], slice], list[torch.Tensor]]] = {
    one.__name__: one for one in (closure_sgd, closure_lbfgs, thawed, added, copied)
}


# ---- what can't be right is refused


def refused() -> list[str]:
    model, said = make(), []
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, slice(0, ROWS)).backward()

    def skipped() -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    def uncalled() -> None:
        class Deaf(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                del closure
                super().step()

        hvd.DistributedOptimizer(Deaf(make().parameters(), lr=0.1)).step(lambda: 0.0)

    def adasum() -> None:
        hvd.DistributedOptimizer(torch.optim.LBFGS(make().parameters()), op=hvd.Adasum)

    for call in (skipped, lambda: copy.deepcopy(optimizer), lambda: pickle.dumps(optimizer),
                 uncalled, adasum):  # fmt: skip
        try:
            call()
        except InvalidArgumentError as error:
            said.append(str(error))
    optimizer.synchronize()
    skipped()
    for change in (lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
                   model.zero_grad):  # fmt: skip
        optimizer.zero_grad()
        loss_of(model, slice(0, ROWS)).backward()
        change()
        try:
            optimizer.step()
        except InvalidArgumentError as error:
            said.append(str(error))
    return said


def adasum_added() -> float:
    """A parameter that is added later is stepped on as well."""
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=1.0), op=hvd.Adasum)
    optimizer.add_param_group({"params": [second]})
    (first + second).sum().backward()
    optimizer.step()
    return second.item()


def all_of_it() -> dict[str, Any]:
    torch.set_num_threads(1)
    hvd.init()
    rows = slice(hvd.rank() * ROWS, (hvd.rank() + 1) * ROWS)
    found: dict[str, Any] = {
        name: program(hvd.DistributedOptimizer, rows) for name, program in PROGRAMS.items()
    }
    return found | {"refused": refused(), "adasum": adasum_added()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run(all_of_it, np=RANKS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_weights_are_those_of_one_device(name: str, found: list[dict[str, Any]]) -> None:
    alone = PROGRAMS[name](same, slice(0, RANKS * ROWS))
    for p, q, expected in zip(found[0][name], found[1][name], alone, strict=True):
        assert torch.equal(p, q)  # to the bit
        assert torch.allclose(p, expected, rtol=1e-9, atol=1e-9)


def test_what_would_step_on_gradients_of_one_rank_is_refused(found: list[dict[str, Any]]) -> None:
    for one in found:
        skipped, copied_early, pickled, uncalled, adasum, *changed = one["refused"]
        assert "Call optimizer.synchronize()" in skipped
        assert "can't be copied while gradients are on their way" in copied_early
        assert "Save optimizer.state_dict()" in pickled
        assert "did not call the closure" in uncalled
        assert "LBFGS makes one of all together" in adasum
        assert ["was changed after backward()" in text for text in changed] == [True, True]


def test_adasum_steps_on_parameters_that_came_later(found: list[dict[str, Any]]) -> None:
    assert [one["adasum"] for one in found] == [-1.0] * RANKS
