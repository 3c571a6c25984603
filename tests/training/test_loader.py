"""The loader: every row once, the same training whatever the ranks and micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import InvalidArgumentError  # noqa: E402


class Numbers(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Any:
        return torch.tensor([float(row), 1.0], dtype=torch.float64)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 1), (2, 3)])
def test_it_goes_on_where_it_was_on_other_ranks(before: int, after: int) -> None:
    def first(comm: Any) -> tuple[int, int]:
        loader = rd.loader(Numbers(60), 12, comm=comm, quiet=True)
        for _ in range(2):
            for number, _ in enumerate(loader):
                if loader.epoch == 1 and number == 2:
                    return loader.epoch, loader.done
        return -1, -1

    def whole(comm: Any) -> list[list[float]]:
        loader = rd.loader(Numbers(60), 12, comm=comm, quiet=True)
        return [rows[:, 0].tolist() for _ in range(2) for rows in loader]

    def rest(comm: Any, epoch: int, done: int) -> list[list[float]]:
        loader = rd.loader(Numbers(60), 12, comm=comm, quiet=True)
        loader.epoch, loader.done = epoch, done
        return [rows[:, 0].tolist() for rows in loader]

    places = rd.run(first, before, "threads")
    assert set(places) == {(1, 3)}
    ranks = rd.run(rest, after, "threads", args=places[0])
    merged = [[row for rank in ranks for row in rank[step]] for step in range(2)]
    assert merged == rd.run(whole, 1, "threads")[0][-2:]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("micro", [None, 1, 2, 4])
def test_micro_batches_change_nothing(size: int, micro: int | None) -> None:
    start = torch.nn.Linear(2, 1).double()

    def be_rank(comm: Any) -> tuple[Any, int]:
        model = torch.nn.Linear(2, 1).double()
        model.load_state_dict(start.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model, optimizer = rd.prepare(model, optimizer, comm=comm)
        loader = rd.loader(
            Numbers(36), 12, comm=comm, model=model, micro_batch=micro, shuffle=False, quiet=True
        )
        for rows in loader:
            model(rows).square().mean().backward()
            optimizer.clip_grad_norm_(3.0)
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().numpy().copy(), optimizer.run.steps

    model = torch.nn.Linear(2, 1).double()
    model.load_state_dict(start.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for first in range(0, 36, 12):
        rows = torch.stack([Numbers(36)[row] for row in range(first, first + 12)])
        model(rows).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimizer.step()
        optimizer.zero_grad()
    for weight, steps in rd.run(be_rank, size, "threads"):
        assert steps == 3
        np.testing.assert_allclose(weight, model.weight.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "ps"])
@pytest.mark.parametrize("batch", [1, 5])
def test_every_row_weighs_the_same_however_a_batch_is_divided(strategy: str, batch: int) -> None:
    """Batches that no number of ranks divides, ranks and micro-batches without rows."""
    rows = torch.arange(44.0, dtype=torch.float64).reshape(11, 4).sin()
    labels = torch.arange(11) % 3
    data = torch.utils.data.TensorDataset(rows, labels)
    start = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))

    def train(comm: Any, strategy: str, micro: int | None) -> tuple[Any, int]:
        model = copy.deepcopy(start).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
        batches = rd.loader(data, batch, comm=comm, model=model, micro_batch=micro, quiet=True)
        for x, y in batches:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = rd.full_state_dict(model)
        return torch.cat([one.flatten() for one in state.values()]).numpy(), optimizer.run.steps

    due, steps = rd.run(train, 1, "threads", ("ddp", None))[0]
    assert steps == -(-11 // batch)
    for size in (1, 2, 3):
        for micro in (None, 2, 1):
            for found, count in rd.run(train, size, "threads", (strategy, micro)):
                assert count == steps
                np.testing.assert_allclose(found, due, rtol=1e-12, atol=1e-13)


def test_only_backward_passes_weigh() -> None:
    """What `torch.autograd.grad` and `rd.backward` give is left alone."""

    def be_rank(comm: Any) -> None:
        model = torch.nn.Linear(2, 1, bias=False).double()
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = rd.prepare(model, optimizer, comm=comm)
        for rows in rd.loader(Numbers(3), 3, comm=comm, shuffle=False, quiet=True):
            mean = model(rows).mean()
            (own,) = torch.autograd.grad(mean, [model.weight], retain_graph=True)
            np.testing.assert_allclose(own[0].numpy(), rows.mean(0).numpy(), rtol=1e-12)
            mean.backward()
            np.testing.assert_allclose(model.weight.grad[0].numpy(), [1.0, 1.0], rtol=1e-12)
            optimizer.zero_grad()
            rd.backward(model(rows).sum(), weight=len(rows))
            np.testing.assert_allclose(model.weight.grad[0].numpy(), [1.0, 1.0], rtol=1e-12)
            optimizer.zero_grad()
        model(rows).mean().backward()  # after the loop it weighs as it did
        np.testing.assert_allclose(model.weight.grad[0].numpy(), [1.0, 1.0], rtol=1e-12)
        optimizer.zero_grad()
        own = rows.clone()
        del rows
        model(own).mean().backward()  # which is of no loader
        due = (np.array([0.5, 1.0]) + np.array([2.0, 1.0])) / 2
        np.testing.assert_allclose(model.weight.grad[0].numpy(), due, rtol=1e-12)

    rd.run(be_rank, 2, "threads")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"batch_size": 0}, "whole number from 1"),
        ({}, "batch_size"),
        ({"batch_size": 400, "drop_last": True}, "fewer than one batch"),
        ({"batch_size": 4, "micro_batch": 0}, "micro_batch"),
        ({"batch_size": 4, "micro_batch": 1}, "model="),
    ],
)
def test_what_can_not_be_shared_is_named(options: dict[str, Any], word: str) -> None:
    def be_rank(comm: Any) -> str:
        with pytest.raises(InvalidArgumentError) as error:
            rd.loader(Numbers(20), comm=comm, **options)
        return str(error.value)

    for told in rd.run(be_rank, 2, "threads"):
        assert word in told


@pytest.mark.parametrize(
    ("batch", "drop", "told"),
    [
        (12, False, "12 = 2 ranks x 1 micro-batches x 6 rows; the last batch has 2"),
        (12, True, "12 = 2 ranks x 1 micro-batches x 6 rows; the last 2 of 50 rows are left out"),
        (5, False, "5 = 2 ranks x 1 micro-batches x at most 3 rows"),
    ],
)
def test_the_arithmetic_is_printed_once(capsys: Any, batch: int, drop: bool, told: str) -> None:  # noqa: FBT001
    rd.run(
        lambda comm: rd.loader(Numbers(50), batch, comm=comm, drop_last=drop).epoch, 2, "threads"
    )
    assert capsys.readouterr().err == f"roundelay: batch of {told}\n"


# ---- loops that are left


@pytest.mark.parametrize(
    ("micro", "after"), [(None, 1), (None, 3), (2, 1), (2, 2), (2, 3), (2, 5), (2, 9)]
)
def test_a_loop_that_was_left_is_over_and_the_next_is_another_epoch(
    micro: int | None, after: int
) -> None:
    def be_rank(comm: Any) -> list[Any]:
        model = torch.nn.Linear(2, 1).double()
        model, _ = rd.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), comm=comm)
        loader = rd.loader(Numbers(36), 12, comm=comm, model=model, micro_batch=micro, quiet=True)
        whole = rd.loader(Numbers(36), 12, comm=comm, model=model, micro_batch=micro, quiet=True)
        epochs = [[rows[:, 0].tolist() for rows in whole] for _ in range(3)]
        for number, rows in enumerate(loader):
            assert rows[:, 0].tolist() == epochs[0][number]
            if number + 1 == after:
                break
        at = loader.epoch, loader.done
        again = [rows[:, 0].tolist() for rows in loader]
        third = [rows[:, 0].tolist() for rows in loader]
        loader.epoch, loader.done = at  # to go on where it was left
        rest = [rows[:, 0].tolist() for rows in loader]
        parts = len(epochs[0]) // 3
        assert again == epochs[1]
        assert third == epochs[2]
        assert rest == epochs[0][after // parts * parts :]
        return epochs

    rd.run(be_rank, 2, "threads")


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "ps"])
@pytest.mark.parametrize("leave", [1, 2, 3, 4])
def test_a_batch_that_was_left_in_the_middle_is_given_up(name: str, leave: int) -> None:
    """Batches of two micro-batches, left after so many of them; then another epoch."""
    start = torch.nn.Linear(2, 1).double()

    def steps(model: Any, optimizer: Any, batches: Any) -> None:
        for rows in batches:
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def be_rank(comm: Any) -> tuple[Any, int]:
        model = torch.nn.Linear(2, 1).double()
        model.load_state_dict(start.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model, optimizer = rd.prepare(model, optimizer, strategy=name, comm=comm)
        loader = rd.loader(
            Numbers(24), 12, comm=comm, model=model, micro_batch=3, shuffle=False, quiet=True
        )
        for number, rows in enumerate(loader):
            steps(model, optimizer, [rows])
            if number + 1 == leave:
                break
        steps(model, optimizer, loader)
        return rd.full_state_dict(model)["weight"].numpy().copy(), optimizer.run.steps

    model = torch.nn.Linear(2, 1).double()
    model.load_state_dict(start.state_dict())
    whole = [torch.stack([Numbers(24)[row] for row in range(at, at + 12)]) for at in (0, 12)]
    steps(model, torch.optim.SGD(model.parameters(), lr=1e-3), [*whole[: leave // 2], *whole])
    for weight, count in rd.run(be_rank, 2, "threads"):
        assert count == 2 + leave // 2
        np.testing.assert_allclose(weight, model.weight.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize("at", [0, 1])
def test_a_loop_inside_another_changes_nothing(at: int) -> None:
    """Validation in the middle of a batch or between two, to its end or not."""
    start = torch.nn.Linear(2, 1).double()

    def be_rank(comm: Any, inside: str) -> Any:
        model = torch.nn.Linear(2, 1).double()
        model.load_state_dict(start.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model, optimizer = rd.prepare(model, optimizer, comm=comm)
        train, other = (
            rd.loader(Numbers(36), 12, comm=comm, model=model, micro_batch=3, quiet=True)
            for _ in range(2)
        )
        seen = []
        for number, rows in enumerate(train):
            model(rows).square().mean().backward()
            if inside and number % 2 == at:
                for more, valid in enumerate(other):
                    with torch.no_grad():
                        seen.append(model(valid).sum().item())
                    if inside == "break" and more == 2:
                        break
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().numpy().copy(), optimizer.run.steps, len(seen)

    plain = rd.run(be_rank, 2, "threads", args=("",))
    for inside, count in (("whole", 18), ("break", 9)):
        for one, other in zip(rd.run(be_rank, 2, "threads", args=(inside,)), plain, strict=True):
            assert (one[0] == other[0]).all()
            assert (one[1], one[2]) == (3, count)


def test_passes_of_two_loaders_are_not_mixed() -> None:
    def be_rank(comm: Any) -> str:
        model = torch.nn.Linear(2, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model, optimizer = rd.prepare(model, optimizer, comm=comm)
        one, two = (
            iter(rd.loader(Numbers(36), 12, comm=comm, model=model, micro_batch=3, quiet=True))
            for _ in range(2)
        )
        model(next(one)).sum().backward()
        with pytest.raises(InvalidArgumentError) as error:
            model(next(two)).sum().backward()
        return str(error.value)

    assert all("loader" in told for told in rd.run(be_rank, 2, "threads"))


@pytest.mark.parametrize("gated", [True, False])
def test_schedulers_step_once_for_each_batch(gated: bool) -> None:  # noqa: FBT001
    def be_rank(comm: Any) -> tuple[int, Any]:
        model = torch.nn.Linear(2, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = rd.prepare(model, optimizer, comm=comm)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        loader = rd.loader(Numbers(36), 12, comm=comm, model=model, micro_batch=2, quiet=True)
        for rows in loader:
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if loader.last_of_step or not gated:
                schedule.step()
        return optimizer.run.steps, schedule.get_last_lr()

    if gated:
        assert rd.run(be_rank, 2, "threads") == [(3, [0.0625])] * 2
    else:
        with pytest.raises(InvalidArgumentError, match=r"loader\.last_of_step"):
            rd.run(be_rank, 2, "threads")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "ps"])
def test_gradients_may_be_forgotten_where_a_batch_begins(strategy: str) -> None:
    """A batch in one piece, and in micro-batches with `zero_grad` before each or the first."""
    rows = torch.arange(48.0, dtype=torch.float64).reshape(12, 4).sin()

    def train(comm: Any, micro_batch: int | None, where: str) -> list[float]:
        model = torch.nn.Linear(4, 1, bias=False).double()
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
        data = torch.utils.data.TensorDataset(rows)
        batches = rd.loader(
            data, 4, comm=comm, model=model, micro_batch=micro_batch, shuffle=False, quiet=True
        )
        for (x,) in batches:
            if where == "each" or batches.first_of_step:
                optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        weight: list[float] = rd.full_state_dict(model)["weight"].flatten().tolist()
        return weight

    due = rd.run(train, 2, "threads", (None, "each"))[0]
    for where in ("each", "first"):
        for found in rd.run(train, 2, "threads", (1, where)):
            assert found == pytest.approx(due, rel=1e-12)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_an_iterator_that_stands_between_micro_batches_is_told(strategy: str) -> None:
    """Steps on something else would wait for the rest of its batch for ever."""

    def be_rank(comm: Any) -> None:
        model = torch.nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
        data = torch.ones(8, 3).double()
        loader = rd.loader(data, 8, comm=comm, model=model, micro_batch=2, quiet=True)
        standing: Any = iter(loader)
        x = next(standing)

        def step() -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        step()
        with pytest.raises(InvalidArgumentError, match="micro-batches to come"):
            step()
        standing.close()
        before = rd.full_state_dict(model)["weight"].clone()
        step()
        assert not torch.equal(before, rd.full_state_dict(model)["weight"])

    rd.run(be_rank, 2, "threads")
