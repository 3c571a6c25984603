"""torch's `GradScaler` with `hvd.DistributedOptimizer`: all ranks step, or none does."""

# Some of torch has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import roundelay.horovod.torch as hvd
from roundelay.errors import InvalidArgumentError
from roundelay.horovod import run

RANKS, ROWS, STEPS = 2, 4, 4
LIMIT = 0.1
X = torch.randn(STEPS, RANKS * ROWS, 3, generator=torch.Generator().manual_seed(1))
Y = torch.randn(STEPS, RANKS * ROWS, 2, generator=torch.Generator().manual_seed(2))
X[1, -1] = torch.inf  # in the second step, a row of the last rank
Program = Callable[[Any, Any, Any], None]
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),  # divides by itself
}


def plain(scaler: Any, optimizer: Any, _: Any) -> None:
    scaler.step(optimizer)
    scaler.update()


def clipped(scaler: Any, optimizer: Any, model: Any) -> None:
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    scaler.step(optimizer)
    scaler.update()


def as_horovod_says(scaler: Any, optimizer: Any, model: Any) -> None:
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    skip = getattr(optimizer, "skip_synchronize", nullcontext)
    with skip():
        scaler.step(optimizer)
    scaler.update()


def twice(scaler: Any, optimizer: Any, _: Any) -> None:
    """Synchronize after the scaler has: they are not reduced again."""
    scaler.unscale_(optimizer)
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    scaler.step(optimizer)
    scaler.update()


PROGRAMS: dict[str, tuple[Program, str, dict[str, Any]]] = {
    "plain": (plain, "sgd", {}),
    "fused": (plain, "fused", {}),
    "clipped": (clipped, "sgd", {}),
    "clipped, fused": (clipped, "fused", {}),
    "clipped, in groups": (clipped, "sgd", {"groups": 2}),
    "as Horovod says": (as_horovod_says, "sgd", {}),
    "sum": (plain, "sgd", {"op": hvd.Sum}),
    "sum, twice": (twice, "sgd", {"op": hvd.Sum}),
    "passes": (plain, "sgd", {"backward_passes_per_step": 2}),
}


def trained(name: str, rows: slice, *, wrapped: bool) -> list[Any]:
    """Return the weights, how often the optimizer stepped, and the scale in the end."""
    program, optimizer_name, options = PROGRAMS[name]
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    stepped: list[int] = []
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, **options)
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    share = 1 / RANKS if wrapped and options.get("op") == hvd.Sum else 1.0
    passes = options.get("backward_passes_per_step", 1)
    for x, y in zip(X[:, rows], Y[:, rows], strict=True):
        optimizer.zero_grad()
        for _ in range(passes):
            loss = torch.nn.functional.mse_loss(model(x), y) * share / passes
            scaler.scale(loss).backward()
        program(scaler, optimizer, model)
    return [[p.detach() for p in model.parameters()], len(stepped), scaler.get_scale()]


def refused() -> list[str]:
    """Return what is said to those who let a scaler look at gradients of one rank."""
    said = []
    for op in (hvd.Average, hvd.Adasum):
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=op)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(X[0, :ROWS]).sum()).backward()
        skip = optimizer.skip_synchronize if op == hvd.Average else nullcontext
        try:
            with skip():
                scaler.step(optimizer)
        except InvalidArgumentError as error:
            said.append(str(error))
        optimizer.step()
    return said


def all_of_it() -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)
    hvd.init()
    rows = slice(hvd.rank() * ROWS, (hvd.rank() + 1) * ROWS)
    found: dict[str, Any] = {name: trained(name, rows, wrapped=True) for name in PROGRAMS}
    return found | {"refused": refused()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run(all_of_it, np=RANKS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_ranks_leave_out_the_same_step(name: str, found: list[dict[str, Any]]) -> None:
    alone, *others = trained(name, slice(0, RANKS * ROWS), wrapped=False)
    for weights, *rest in (one[name] for one in found):
        assert rest == others
        assert rest[1] == 4.0  # halved once
        for p, first, expected in zip(weights, found[0][name][0], alone, strict=True):
            assert torch.equal(p, first)  # to the bit
            assert torch.allclose(p, expected, rtol=1e-5, atol=1e-6)


def test_a_scaler_that_would_look_at_one_rank_is_refused(found: list[dict[str, Any]]) -> None:
    for one in found:
        skipped, adasum = one["refused"]
        assert "scaler.step() was called inside skip_synchronize()" in skipped
        assert "op=hvd.Adasum steps during backward()" in adasum
