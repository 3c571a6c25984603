"""Ranks train on the same batch, or all of them are told: also when one catches an error."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CollectiveMismatch  # noqa: E402

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "ps")
UNITS = "label"  # under zero3 units tell it, before any gradient does
ROWS = torch.arange(32.0, dtype=torch.float64).view(8, 4)


class Picky(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Raises at the end of its forward when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2).double()
        self.fails = False

    def forward(self, rows: Any) -> Any:
        found = self.layer(rows)
        if self.fails:
            raise LookupError("a row that it does not like")
        return found


def prepared(comm: Any, strategy: str) -> tuple[Any, Any]:
    model = Picky()
    own: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    return rd.prepare(model, own, strategy=strategy, comm=comm)


def train(comm: Any, model: Any, own: Any, batches: Any, *, repeat: bool = False) -> int:
    """Train on all of them; rank 1 finds fault with the second, and goes on."""
    count = 0
    for number, rows in enumerate(batches):
        model.fails = number == 1 and comm.rank == 1
        try:
            loss = model(rows).square().mean()
        except LookupError:
            model.fails = False
            if not repeat:
                continue
            loss = model(rows).square().mean()
        loss.backward()
        own.step()
        own.zero_grad()
        count += 1
    return count


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_leaves_out_a_batch_is_named_on_all(strategy: str) -> None:
    def be_rank(comm: Any, *, loader: bool) -> str:
        model, own = prepared(comm, strategy)
        plain = [ROWS[2 * at : 2 * at + 2] for at in range(4)]
        batches = rd.loader(ROWS, batch_size=2, comm=comm) if loader else plain
        with pytest.raises(CollectiveMismatch) as error:
            train(comm, model, own, batches)
        return str(error.value)

    for told in rd.run(lambda comm: be_rank(comm, loader=True), 2, "threads"):
        way = "rank 0 in epoch 0 batch 1; rank 1 in epoch 0 batch 2"
        assert (UNITS if strategy == "zero3" else way) in told
    for told in rd.run(lambda comm: be_rank(comm, loader=False), 2, "threads"):
        assert (UNITS if strategy == "zero3" else "The model raised an error on rank 1") in told


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_of_a_loader_may_be_repeated(strategy: str) -> None:
    def be_rank(comm: Any) -> int:
        model, own = prepared(comm, strategy)
        done = train(comm, model, own, rd.loader(ROWS, batch_size=2, comm=comm), repeat=True)
        rd.full_state_dict(model)
        return done

    if strategy == "zero3":
        pytest.skip("a rank that calls its units once more is told so by another law")
    assert rd.run(be_rank, 2, "threads") == [4, 4]


def test_a_glance_at_another_loader_is_a_ranks_own_affair() -> None:
    def be_rank(comm: Any) -> int:
        model, own = prepared(comm, "zero2")
        other = rd.loader(ROWS, batch_size=2, comm=comm)
        done = 0
        for rows in rd.loader(ROWS, batch_size=4, comm=comm):
            if comm.rank == 0:
                next(iter(other))
            done += train(comm, model, own, [rows])
        return done

    assert rd.run(be_rank, 2, "threads") == [2, 2]


@pytest.mark.parametrize("fails_in", range(3))
@pytest.mark.parametrize("size", [2, 3])
def test_units_that_are_kept_for_backward_do_not_hide_a_failed_forward(
    size: int, fails_in: int
) -> None:
    def be_rank(comm: Any) -> str:
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4).double() for _ in range(3)))
        fails: list[int] = []

        def look(layer: Any, _: Any) -> None:
            if layer is model[fails_in] and fails:
                raise LookupError

        for layer in model:
            layer.register_forward_pre_hook(look)
        own: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = rd.Zero(3, reshard_after_forward=False)
        model, own = rd.prepare(model, own, strategy=strategy, comm=comm)

        def train_steps(count: int) -> None:
            for _ in range(count):
                own.zero_grad()
                model(ROWS).square().mean().backward()
                own.step()

        train_steps(2)  # units are prefetched from the second on
        if comm.rank == 1:
            fails.append(1)
            with pytest.raises(LookupError):
                model(ROWS)
            fails.clear()
        with pytest.raises(CollectiveMismatch) as error:
            train_steps(2)
        return str(error.value)

    for told in rd.run(be_rank, size, "threads", timeout=20):
        assert "The model raised an error on rank 1" in told
