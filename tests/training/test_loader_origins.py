"""A backward pass weighs as the batch that it came from, in whatever order batches are used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import roundelay as rd
from roundelay.errors import CollectiveMismatch, InvalidArgumentError

ROWS = torch.arange(1.0, 14, dtype=torch.float64)
Train = Callable[[torch.Tensor], None]
Load = Callable[[int, int, int], Any]


def nested(load: Load, train: Train) -> None:
    for outer in load(0, 5, 5):
        for inner in load(5, 9, 4):
            train(inner)
        train(outer)


def side_by_side(load: Load, train: Train) -> None:
    for one, other in zip(load(0, 4, 4), load(4, 7, 3), strict=True):
        train(one)
        train(other)


def one_ahead(load: Load, train: Train) -> None:
    batches = iter(load(0, 7, 4))
    now = next(batches, None)
    while now is not None:
        coming = next(batches, None)
        train(now)
        now = coming


def kept(load: Load, train: Train) -> None:
    for batch in list(load(0, 7, 4)):
        train(batch)


def again_and_again(load: Load, train: Train) -> None:
    for batch in itertools.islice(itertools.cycle(load(0, 7, 4)), 5):
        train(batch)


def after_the_loop(load: Load, train: Train) -> None:
    last = None
    for batch in load(0, 7, 4):
        last = batch
    assert last is not None
    train(last)


def looked_at(load: Load, train: Train) -> None:
    for batch in load(0, 5, 5):
        for other in load(5, 10, 3):
            assert len(other) <= 3
        train(batch)


IDIOMS = [nested, side_by_side, one_ahead, kept, again_and_again, after_the_loop, looked_at]


def linear() -> Any:
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    return model


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(rows[:, None]).square().mean()
    return loss


def trainer(model: Any, optimizer: Any) -> Train:
    def train(rows: torch.Tensor) -> None:
        loss_of(model, rows).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return train


def batches_of(comm: Any) -> Load:
    def load(begin: int, end: int, size: int) -> Any:
        return rd.loader(ROWS[begin:end], size, comm=comm, shuffle=False, quiet=True)

    return load


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def alone(idiom: Callable[[Load, Train], None]) -> float:
    model = linear()

    def load(begin: int, end: int, size: int) -> Iterator[torch.Tensor]:
        return iter(torch.split(ROWS[begin:end], size))

    idiom(load, trainer(model, sgd(model)))
    return model.weight.item()  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "ps"])
def test_every_idiom_is_one_device(strategy: str, ranks: int) -> None:
    def be_rank(comm: Any) -> list[float]:
        found = []
        for idiom in IDIOMS:
            model = linear()
            model, optimizer = rd.prepare(model, sgd(model), strategy=strategy, comm=comm)
            idiom(batches_of(comm), trainer(model, optimizer))
            found.append(rd.full_state_dict(model)["weight"].item())
        return found

    due = [alone(idiom) for idiom in IDIOMS]
    for found in rd.run(be_rank, ranks, "threads"):
        np.testing.assert_allclose(found, due, rtol=1e-12)


def test_what_can_not_be_told_apart_is_refused() -> None:
    def be_rank(comm: Any) -> None:
        model = linear()
        model, optimizer = rd.prepare(model, sgd(model), comm=comm)
        load, train = batches_of(comm), trainer(model, optimizer)
        with pytest.raises(InvalidArgumentError, match="several of them"):
            for one, other in zip(load(0, 4, 4), load(4, 7, 3), strict=True):
                (loss_of(model, one) + loss_of(model, other)).backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        with pytest.raises(InvalidArgumentError, match="none of them"):
            for batch in load(0, 5, 5):
                train(torch.cat([batch, batch]))
                for inner in load(5, 9, 4):
                    train(inner.clone())

    rd.run(be_rank, 2, "threads")


def test_micro_batches_of_one_model_are_not_another_ones() -> None:
    def be_rank(comm: Any) -> None:
        first, second = linear(), linear()
        first, one = rd.prepare(first, sgd(first), comm=comm)
        second, two = rd.prepare(second, sgd(second), comm=comm)
        loader = rd.loader(ROWS[:4], 4, comm=comm, model=first, micro_batch=1, quiet=True)
        with pytest.raises(InvalidArgumentError, match="micro-batches of another model"):
            for batch in loader:
                trainer(first, one)(batch)
                trainer(second, two)(batch)
        one.zero_grad()
        with pytest.raises(InvalidArgumentError, match="repeats the loss of one micro-batch"):
            for batch in loader:
                one.step(lambda batch=batch: loss_of(first, batch))
        with pytest.raises(InvalidArgumentError, match="were let go"):
            for batch in loader:
                loss_of(first, batch).backward()  # type: ignore[no-untyped-call]
                one.step()
                first.zero_grad()

    rd.run(be_rank, 2, "threads")


def test_a_loader_goes_on_with_a_model_that_was_prepared_again() -> None:
    def be_rank(comm: Any) -> float:
        model = linear()
        model, optimizer = rd.prepare(model, sgd(model), comm=comm)
        loader = rd.loader(ROWS[:4], 4, comm=comm, model=model, micro_batch=1, quiet=True)
        model, optimizer = rd.unprepare(model)
        with pytest.raises(InvalidArgumentError, match="has returned"):
            next(iter(loader))
        model, optimizer = rd.prepare(model, optimizer, comm=comm)
        for batch in loader:
            trainer(model, optimizer)(batch)
        return model.weight.item()  # type: ignore[no-any-return]

    assert rd.run(be_rank, 2, "threads") == pytest.approx([0.985, 0.985], rel=1e-12)


def _clip(optimizer: Any, rank: int) -> None:
    optimizer.clip_grad_norm_(0.1 * (1 + rank))


def _clip_values(optimizer: Any, rank: int) -> None:
    if rank == 0:
        optimizer.clip_grad_value_(0.1)


def _forget(optimizer: Any, rank: int) -> None:
    if rank == 0:
        optimizer.zero_grad()


@pytest.mark.parametrize("deed", [_clip, _clip_values, _forget])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "ps"])
def test_what_ranks_do_to_gradients_is_compared(
    strategy: str, deed: Callable[[Any, int], None]
) -> None:
    def be_rank(comm: Any) -> str:
        model = linear()
        model, optimizer = rd.prepare(model, sgd(model), strategy=strategy, comm=comm)
        loss_of(model, ROWS[:4]).backward()  # type: ignore[no-untyped-call]
        deed(optimizer, comm.rank)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(CollectiveMismatch) as error:
            loss_of(model, ROWS[:4]).backward()  # type: ignore[no-untyped-call]
        return str(error.value)

    for told in rd.run(be_rank, 2, "threads"):
        assert "different things to their gradients" in told
        assert "rank 1: " in told


def test_ranks_that_would_save_different_things_are_told(tmp_path: Any) -> None:
    def be_rank(comm: Any) -> dict[str, Any]:
        model = linear()
        model, optimizer = rd.prepare(model, sgd(model), comm=comm)
        rd.save(tmp_path / "good", model, optimizer)
        with pytest.raises(CollectiveMismatch, match="rank 1: weights only"):
            rd.save(tmp_path / "good", model, optimizer if comm.rank == 0 else None)
        if comm.rank == 0:
            with torch.no_grad():
                model.weight.fill_(9.0)
        with pytest.raises(CollectiveMismatch, match="weight written by hand"):
            rd.save(tmp_path / "good", model, optimizer)
        comm.barrier()
        rd.load(tmp_path / "good", model, optimizer)
        loss_of(model, ROWS[:4]).backward()  # type: ignore[no-untyped-call]
        return {"weight": model.weight.item()}

    assert rd.run(be_rank, 2, "threads") == [{"weight": 1.0}] * 2


def late_passes(comm: Any, strategy: str, way: str) -> Any:
    """Losses of all batches first, the last of them uneven, and backward passes afterwards."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches: Any = torch.tensor_split(ROWS, [4, 8, 12])
    if comm is not None:
        model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
        batches = rd.loader(ROWS, 4, comm=comm, shuffle=False, quiet=True)
    losses = [loss_of(model, rows) for rows in batches]
    if way == "one pass":
        sum(losses).backward()  # type: ignore[union-attr] # it is a tensor
    else:
        for number, loss in enumerate(losses, 1):
            (loss * number).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return (model.state_dict() if comm is None else rd.full_state_dict(model))["weight"].item()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_passes_when_the_loop_is_over_weigh_as_their_batches(strategy: str, size: int) -> None:
    """One for each is right; one through several that weigh differently is refused."""
    due = late_passes(None, "", "each")
    for found in rd.run(late_passes, size, "threads", (strategy, "each")):
        np.testing.assert_allclose(found, due, rtol=1e-12)
    with pytest.raises(InvalidArgumentError, match="several of them"):
        rd.run(late_passes, size, "threads", (strategy, "one pass"))
