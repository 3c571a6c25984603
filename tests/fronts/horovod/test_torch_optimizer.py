"""`hvd.DistributedOptimizer`: every rank's weights are those of one device on the whole batch."""

# Some of torch has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch

import roundelay.horovod.torch as hvd
from roundelay.horovod import run

RANKS, ROWS, STEPS = 2, 4, 3
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "predivide": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": 2},
    "passes": {"backward_passes_per_step": 2},
    "sum": {"op": 1},
    "lists": {"groups": "lists"},
}
GRID = list(product(OPTIMIZERS, OPTIONS))


def make() -> tuple[torch.nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    return model.double(), torch.randn(STEPS, RANKS * ROWS, 3).double(), torch.randn(
        STEPS, RANKS * ROWS, 2).double()  # fmt: skip


def trained(name: str, option: str) -> list[torch.Tensor]:
    """Train on this rank's rows of every batch."""
    model, x, y = make()
    if hvd.rank():
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
    optimizer = OPTIMIZERS[name](model.parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    options = dict(OPTIONS[option])
    if options.get("groups") == "lists":
        options["groups"] = [[*model[0].parameters()]]
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), **options
    )
    rows = slice(hvd.rank() * ROWS, (hvd.rank() + 1) * ROWS)
    for inputs, targets in zip(x[:, rows], y[:, rows], strict=True):
        optimizer.zero_grad()
        passes = options.get("backward_passes_per_step", 1)
        for part in range(passes):
            piece = slice(part * ROWS // passes, (part + 1) * ROWS // passes)
            loss = torch.nn.functional.mse_loss(model(inputs[piece]), targets[piece])
            (loss / passes).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def alone(name: str, option: str) -> list[torch.Tensor]:
    """Train on the whole of every batch."""
    model, x, y = make()
    optimizer = OPTIMIZERS[name](model.parameters())
    for inputs, targets in zip(x, y, strict=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        (loss * RANKS if option == "sum" else loss).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def adasum() -> tuple[list[float], list[float]]:
    """Step once by Adasum from one weight: ranks that agree, and ranks that don't."""
    found = []
    for gradient in ([1.0, 0.0], [float(hvd.rank() == 0), float(hvd.rank() == 1)]):
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum)
        (weight * torch.tensor(gradient)).sum().backward()
        optimizer.step()
        found.append(weight.tolist())
    return found[0], found[1]


def habits() -> list[str]:
    """Do what Horovod's pages show, and what they warn of; return what was said."""
    model, x, y = make()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    said = []
    torch.nn.functional.mse_loss(model(x[0]), y[0]).backward()
    try:
        optimizer.zero_grad()
    except ValueError as error:
        said.append(str(error))
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    model[2](torch.ones(1, 5).double()).sum().backward()  # some gradients are missing
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    said += [str(one.message) for one in caught]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    said += [str(optimizer.param_groups[0]["lr"]), str(isinstance(optimizer, torch.optim.SGD))]
    for wrong in ({"backward_passes_per_step": 0}, {"groups": 0},
                  {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
                  {"named_parameters": [("a", model[0].weight)]},
                  {"named_parameters": [("a", p) for p in model.parameters()]}):  # fmt: skip
        try:
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **wrong)
        except ValueError as error:
            said.append(str(error))
    try:
        hvd.DistributedOptimizer(optimizer)
    except ValueError as error:
        said.append(str(error))
    return said


def sparse() -> list[bool]:
    """Train an embedding with sparse gradients beside one with dense ones."""
    same = []
    for as_dense in (False, True):
        weights = []
        for is_sparse in (False, True):
            torch.manual_seed(1)
            layer = torch.nn.Embedding(6, 2, sparse=is_sparse)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(layer.parameters(), lr=1.0), sparse_as_dense=as_dense
            )
            layer(torch.tensor([hvd.rank(), 3, 3])).square().sum().backward()
            optimizer.step()
            weights.append(layer.weight.detach())
        same.append(torch.allclose(weights[0], weights[1]))
    return same


def all_of_it() -> dict[str, Any]:
    torch.set_num_threads(1)
    hvd.init()
    found: dict[str, Any] = {f"{name} {option}": trained(name, option) for name, option in GRID}
    return found | {"adasum": adasum(), "habits": habits(), "sparse": sparse()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run(all_of_it, np=RANKS)


@pytest.mark.parametrize(("name", "option"), GRID)
def test_weights_are_those_of_one_device(
    name: str, option: str, found: list[dict[str, Any]]
) -> None:
    ranks = [one[f"{name} {option}"] for one in found]
    for p, q, expected in zip(*ranks, alone(name, option), strict=True):
        assert torch.equal(p, q)  # to the bit
        assert torch.allclose(p, expected, rtol=1e-12, atol=1e-12)


def test_adasum_is_a_mean_where_ranks_agree_and_a_sum_where_they_do_not(
    found: list[dict[str, Any]],
) -> None:
    assert [one["adasum"] for one in found] == [([-1.0, 0.0], [-1.0, -1.0])] * RANKS


def test_sparse_gradients_are_as_good_as_dense_ones(found: list[dict[str, Any]]) -> None:
    assert [one["sparse"] for one in found] == [[True, True]] * RANKS


def test_what_is_warned_of_and_what_is_refused(found: list[dict[str, Any]]) -> None:
    for one in found:
        zeroed, warned, rate, kind, passes, groups, predivide, missing, twice, own = one["habits"]
        assert "while gradients are on their way" in zeroed
        assert "called without optimizer.skip_synchronize()" in warned
        assert (rate, kind) == ("0.05", "True")
        assert "backward_passes_per_step" in passes
        assert "groups=" in groups
        assert "gradient_predivide_factor" in predivide
        assert "no name for 3 of the 4" in missing
        assert "there twice: ['a']" in twice
        assert "Wrap an optimizer once" in own
