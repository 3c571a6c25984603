"""Schedulers step once for each step of the optimizer, on all ranks alike, or say why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CollectiveMismatch, InvalidArgumentError  # noqa: E402

kinds = torch.optim.lr_scheduler
ROWS = [*torch.arange(96.0, dtype=torch.float64).view(24, 4).sin()]
START = torch.nn.Linear(4, 1).double()

SCHEDULERS: dict[str, Any] = {
    "lambda": lambda one: kinds.LambdaLR(one, lambda step: 1 / (1 + step)),
    "often": lambda one: kinds.StepLR(one, 1, 0.5),
    "seldom": lambda one: kinds.StepLR(one, 4, 0.5),  # once for four micro-batches
    "one cycle": lambda one: kinds.OneCycleLR(one, 0.1, total_steps=20),
    "warm restarts": lambda one: kinds.CosineAnnealingWarmRestarts(one, 3),
    "plateau": lambda one: kinds.ReduceLROnPlateau(one, patience=0, factor=0.5),
    "sequence": lambda one: kinds.SequentialLR(
        one, [kinds.ConstantLR(one, 0.1, 2), kinds.ExponentialLR(one, 0.9)], [2]
    ),
    "chain": lambda one: kinds.ChainedScheduler(
        [kinds.ConstantLR(one, 0.1, 2), kinds.ExponentialLR(one, 0.9)]
    ),
}


def train(
    comm: Any, kind: str, micro: int | None, gated: bool, before: bool, strategy: str = "ddp"  # noqa: FBT001
) -> tuple[list[float], Any]:  # fmt: skip
    """Step the scheduler after every micro-batch; return the rates of all batches, and weights."""
    model = copy.deepcopy(START)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = SCHEDULERS[kind](optimizer) if before else None
    model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
    scheduler = made or SCHEDULERS[kind](optimizer)
    if gated:
        assert rd.scheduler(rd.scheduler(scheduler)) is scheduler
    loader = rd.loader(
        ROWS, 4, comm=comm, model=model, micro_batch=micro, shuffle=False, quiet=True
    )
    rates = []
    for _ in range(2):
        for x in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if loader.last_of_step:
                rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step(*([1.0] if kind == "plateau" else []))
    assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    return rates, rd.full_state_dict(model)["weight"].numpy().copy()


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("before", [True, False])
def test_micro_batches_do_not_count(kind: str, before: bool) -> None:  # noqa: FBT001
    """Made before `prepare` or after it; without `rd.scheduler` it is refused, by its name."""
    rates, weights = rd.run(train, 1, "threads", (kind, None, False, before))[0]
    assert len(set(rates)) > 1
    for size, micro, strategy in ((1, 1, "ddp"), (2, 1, "zero3"), (2, None, "ps")):
        args = (kind, micro, True, before, strategy)
        for found, others in rd.run(train, size, "threads", args):
            assert found == rates
            np.testing.assert_allclose(others, weights, rtol=1e-12)
    name = type(SCHEDULERS[kind](torch.optim.SGD(START.parameters(), lr=0.1))).__name__
    with pytest.raises(InvalidArgumentError, match=rf"{name}\.step.*rd\.scheduler"):
        rd.run(train, 2, "threads", (kind, 1, False, before))


@pytest.mark.parametrize("each", ["batch", "epoch"])
def test_steps_that_were_skipped_do_not_count(each: str, caplog: Any) -> None:
    """A loss scale at which float16 overflows at first: schedulers follow the optimizer."""

    def be_rank(comm: Any) -> tuple[int, int, int]:
        model = copy.deepcopy(START).float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        precision = rd.Precision(compute=torch.float16, loss_scale=2.0**20)
        model, optimizer = rd.prepare(model, optimizer, precision=precision, comm=comm)
        scheduler = rd.scheduler(kinds.LambdaLR(optimizer, lambda step: 0.9**step))
        for _ in range(3):
            for _ in range(3):
                optimizer.scale(model(torch.ones(2, 4)).sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
                if each == "batch":
                    scheduler.step()
            if each == "epoch":
                scheduler.step()
        assert "_roundelay_seen" not in scheduler.state_dict()
        step = optimizer.run.step
        return scheduler.last_epoch, step.fit, step.skipped

    for steps, fit, skipped in rd.run(be_rank, 2, "threads"):
        assert skipped > 3  # the first epoch had no step at all
        assert fit + skipped == 9
        assert steps == (fit if each == "batch" else 3 - skipped // 3)
    assert "skipped" in caplog.text


def test_a_plateau_is_one_for_all_ranks() -> None:
    def be_rank(comm: Any) -> None:
        model = copy.deepcopy(START)
        model, optimizer = rd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
        scheduler = rd.scheduler(kinds.ReduceLROnPlateau(optimizer, patience=0))
        scheduler.step(float("nan"))
        scheduler.step(torch.tensor(2.0))
        with pytest.raises(
            CollectiveMismatch, match=r"1\.0 on rank 0, 2\.0 on rank 1.*rd\.evaluate"
        ):
            scheduler.step(1.0 + comm.rank)
        assert scheduler.last_epoch == 2

    rd.run(be_rank, 2, "threads")


def test_it_is_saved_and_loaded_as_its_own_class(tmp_path: Path) -> None:
    def be_rank(comm: Any, gated: bool) -> list[float]:  # noqa: FBT001
        model = copy.deepcopy(START)
        model, optimizer = rd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
        scheduler = kinds.ExponentialLR(optimizer, 0.5)
        if gated:
            assert isinstance(rd.scheduler(scheduler), kinds.ExponentialLR)
            for _ in range(2):
                model(torch.ones(1, 4).double()).sum().backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rd.save(tmp_path / "it", model, optimizer, scheduler=scheduler)
        else:
            rd.load(tmp_path / "it", model, optimizer, scheduler=scheduler)
        scheduler.step()
        rates: list[float] = scheduler.get_last_lr()
        return rates

    assert rd.run(be_rank, 2, "threads", (True,)) == [[0.0125]] * 2
    assert rd.run(be_rank, 2, "threads", (False,)) == [[0.0125]] * 2


def test_what_is_no_scheduler_of_a_prepared_optimizer_is_named() -> None:
    optimizer = torch.optim.SGD(START.parameters(), lr=0.1)
    with pytest.raises(InvalidArgumentError, match="SGD"):
        rd.scheduler(optimizer)
    with pytest.raises(InvalidArgumentError, match=r"rd\.prepare"):
        rd.scheduler(kinds.ExponentialLR(optimizer, 0.5))


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "ps"])
def test_ranks_with_different_rates_are_told(strategy: str) -> None:
    """A scheduler that looks at a value of its own rank, and that nobody has told of ranks."""

    def be_rank(comm: Any) -> None:
        model = copy.deepcopy(START)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
        scheduler = kinds.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

        def backward() -> None:
            model(torch.ones(1, 4).double()).sum().backward()

        for step in range(3):
            backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(float(step if comm.rank == 1 and step == 2 else -step))
        with pytest.raises(CollectiveMismatch, match=r"lr=0\.5 in group 0 on rank 0, and 0\.25"):
            backward()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.5
        backward()
        optimizer.step()

    rd.run(be_rank, 3, "threads")


def opened(model: Any) -> None:
    with rd.whole(model):
        pass


ENDS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "backward": lambda model, *_: model(torch.ones(1, 4).double()).sum().backward(),
    "full_state_dict": lambda model, *_: rd.full_state_dict(model),
    "whole_tensors": lambda model, *_: list(rd.whole_tensors(model)),
    "unprepare": lambda model, *_: rd.unprepare(model),
    "whole": lambda model, *_: opened(model),
    "save": lambda model, _, path: rd.save(path, model),
    "evaluate": lambda model, rows, _: rd.evaluate(model, rows, lambda model, x: model(x).mean()),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_options_that_differ_in_the_last_step_are_told(
    strategy: str, end: str, tmp_path: Path
) -> None:
    """Changed on one rank between a backward pass and the step, and maybe changed back."""

    def be_rank(comm: Any) -> None:
        for option, value, back in (("lr", 0.5, 0), ("lr", 0.5, 1), ("betas", (0.5, 0.9), 0)):
            model = copy.deepcopy(START)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
            data = rd.loader(torch.ones(4, 4).double(), 2, comm=comm, quiet=True)
            model(torch.ones(1, 4).double()).sum().backward()
            group = optimizer.param_groups[0]
            before, group[option] = group[option], value if comm.rank == 1 else group[option]
            optimizer.step()
            group[option] = before if back else group[option]
            optimizer.zero_grad()
            with pytest.raises(CollectiveMismatch, match=f"rank [01].*{option}=|{option}=.*rank"):
                ENDS[end](model, data, tmp_path)

    rd.run(be_rank, 2, "threads")
