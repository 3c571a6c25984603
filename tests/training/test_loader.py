"""The loader: every row once, the same training whatever the ranks and micro-batches."""

from __future__ import annotations

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


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("rows", "batch"), [(24, 12), (50, 12), (100, 24)])
def test_every_row_of_whole_batches_comes_once_and_batches_are_the_same(
    size: int, rows: int, batch: int
) -> None:
    def be_rank(comm: Any) -> list[list[list[float]]]:
        loader = rd.loader(Numbers(rows), batch, comm=comm, quiet=True)
        return [[one[:, 0].tolist() for one in loader] for _ in range(2)]

    ranks = rd.run(be_rank, size, "threads")
    alone = rd.run(be_rank, 1, "threads")[0]
    for epoch in range(2):
        merged = [
            [row for rank in ranks for row in rank[epoch][step]] for step in range(rows // batch)
        ]
        assert merged == alone[epoch]
        flat = [row for step in merged for row in step]
        assert len(flat) == len(set(flat)) == rows // batch * batch
    assert alone[0] != alone[1]  # another order every epoch


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


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"batch_size": 5}, "multiple of 2"),
        ({"batch_size": 0}, "multiple of 2"),
        ({"batch_size": 400}, "fewer than one batch"),
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


def test_the_arithmetic_is_printed_once(capsys: Any) -> None:
    rd.run(lambda comm: len(rd.loader(Numbers(50), 12, comm=comm)), 2, "threads")
    told = capsys.readouterr().err
    assert told == (
        "roundelay: batch of 12 = 2 ranks x 1 micro-batches x 6 rows; the last 2 of 50 rows are "
        "left out\n"
    )
