"""Evaluation over ranks: every row once, and the numbers of one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CollectiveMismatch, InvalidArgumentError  # noqa: E402

ROWS = 11
X = torch.arange(ROWS * 4.0, dtype=torch.float64).view(ROWS, 4).sin()
Y = torch.arange(ROWS) % 3
WEIGHT = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


def make() -> Any:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Dropout(0.5), nn.BatchNorm1d(3)).double()
    with torch.no_grad():
        model[0].weight.copy_(WEIGHT)
    model[2].eval()  # a mode of its own
    return model


def measure(model: Any, batch: Any) -> dict[str, Any]:
    x, y = batch
    out = model(x)
    losses = nn.functional.cross_entropy(out, y, reduction="none")
    confusion = torch.zeros(3, 3, dtype=torch.int64)
    confusion.index_put_((y, out.argmax(1)), torch.ones(len(y), dtype=torch.int64), accumulate=True)
    assert len(x) > 0  # also on a rank that has no rows
    return {
        "loss": losses.mean(), "by row": losses, "columns": out, "accuracy": (out.argmax(1) == y),
        "weighed": (losses.sum(), len(y)), "plain": float(losses.mean()),
        "correct": (out.argmax(1) == y).sum(), "rows": len(y), "confusion": confusion,
        "total": losses.sum(),
    }  # fmt: skip


SUMS = ("correct", "rows", "confusion", "total")


def on_one_device() -> dict[str, Any]:
    model = make().eval()
    with torch.no_grad():
        found = measure(model, (X, Y))
        found["columns"], found["accuracy"] = model(X).mean(0), found["accuracy"].double().mean()
    found["by row"] = found["weighed"] = found["plain"] = found["loss"]
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "ps"])
@pytest.mark.parametrize("source", ["rows", "stream"])
def test_numbers_are_those_of_one_device(strategy: str, source: str) -> None:
    due = on_one_device()

    def be_rank(comm: Any, batch: int) -> None:
        model = make()
        model, _ = rd.prepare(
            model, torch.optim.SGD(model.parameters()), strategy=strategy, comm=comm
        )
        data = Stream() if source == "stream" else torch.utils.data.TensorDataset(X, Y)
        batches = rd.loader(data, batch, comm=comm, quiet=True)
        for _ in range(2):
            found = rd.evaluate(model, batches, measure, sums=SUMS)
            assert found.keys() == due.keys()
            for name, one in found.items():
                np.testing.assert_allclose(one, due[name], rtol=1e-12, atol=1e-14, err_msg=name)
        assert (type(found["rows"]), type(found["loss"])) == (int, float)
        single = rd.evaluate(model, batches, lambda model, batch: measure(model, batch)["loss"])
        assert single == pytest.approx(due["loss"].item(), rel=1e-12)
        assert [one.training for one in model] == [True, True, False]
        assert torch.is_grad_enabled()

    for size, batch in ((1, 4), (2, 4), (3, 1), (3, 5)):
        rd.run(be_rank, size, "threads", (batch,))


def test_what_fails_on_one_rank_is_told_on_all_and_the_model_is_as_it_was() -> None:
    def be_rank(comm: Any) -> None:
        model = make()
        batches = rd.loader(torch.utils.data.TensorDataset(X, Y), 4, comm=comm, quiet=True)

        def failing(model: Any, batch: Any) -> Any:
            if comm.rank == 1:
                raise LookupError("lost")
            return measure(model, batch)["loss"]

        with pytest.raises(LookupError if comm.rank == 1 else CollectiveMismatch, match="lost"):
            rd.evaluate(model, batches, failing)
        assert [one.training for one in model] == [True, True, False]
        assert torch.is_grad_enabled()
        with pytest.raises(CollectiveMismatch, match="same names"):
            rd.evaluate(model, batches, lambda *_: {f"loss {comm.rank}": 1.0})
        assert rd.evaluate(model, batches, lambda *_: 2.0) == pytest.approx(2.0)

    rd.run(be_rank, 2, "threads")


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (3, "sums="),
        (torch.tensor(3), "sums="),
        (torch.ones(7), "7 values"),
        ("much", "no number"),
        ((1.0, 0), "add up to 0"),
    ],
)
def test_what_has_no_mean_is_named(value: Any, word: str) -> None:
    def be_rank(comm: Any) -> None:
        batches = rd.loader(torch.utils.data.TensorDataset(X, Y), 4, comm=comm, quiet=True)
        with pytest.raises(InvalidArgumentError, match=word):
            rd.evaluate(make(), batches, lambda *_: {"it": value})

    rd.run(be_rank, 2, "threads")


def test_loaders_that_leave_rows_out_are_refused() -> None:
    def be_rank(comm: Any) -> None:
        data = torch.utils.data.TensorDataset(X, Y)
        batches = rd.loader(data, 4, comm=comm, drop_last=True, quiet=True)
        with pytest.raises(InvalidArgumentError, match="drop_last"):
            rd.evaluate(make(), batches, measure)
        with pytest.raises(InvalidArgumentError, match="DataLoader"):
            rd.evaluate(make(), torch.utils.data.DataLoader(data), measure)

    rd.run(be_rank, 2, "threads")
