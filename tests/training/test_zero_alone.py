"""Under zero3 a call that one rank makes alone is told on all ranks at once, and by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CommunicationError, RoundelayError  # noqa: E402

nn = torch.nn
ROWS = torch.arange(32.0).view(8, 4)


def look(model: Any, *_: Any) -> None:
    with torch.no_grad():
        model(ROWS)


def call(model: Any, *_: Any) -> None:
    model(ROWS)


def state(model: Any, *_: Any) -> None:
    rd.full_state_dict(model)


def tensors(model: Any, *_: Any) -> None:
    list(rd.whole_tensors(model))


def save(model: Any, own: Any, path: Path, _: Any) -> None:
    rd.save(path / "one", model, own)


def optimizer_state(_: Any, own: Any, *__: Any) -> None:
    own.state_dict()


def unprepare(model: Any, *_: Any) -> None:
    rd.unprepare(model)


def evaluate(model: Any, _: Any, __: Any, loader: Any) -> None:
    rd.evaluate(model, loader, lambda one, x: one(x).mean())


CALLS: dict[Callable[..., None], str] = {
    look: "without gradients", call: "in backward", state: "rd.full_state_dict",
    tensors: "rd.whole_tensors", save: "rd.save", optimizer_state: "optimizer.state_dict",
    unprepare: "rd.unprepare", evaluate: "rd.evaluate",
}  # fmt: skip


@pytest.mark.parametrize("keeps", [False, True], ids=["reshards", "keeps"])
@pytest.mark.parametrize("act", CALLS, ids=lambda one: one.__name__)
def test_what_one_rank_does_alone(act: Callable[..., None], keeps: bool, tmp_path: Path) -> None:  # noqa: FBT001
    def be_rank(comm: Any) -> str:
        comm.timeout = 30
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        own: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = rd.loader(ROWS, batch_size=4, comm=comm)
        strategy = rd.Zero(3, reshard_after_forward=not keeps)
        model, own = rd.prepare(model, own, strategy=strategy, comm=comm)
        try:
            for step in range(3):
                if step == 1 and comm.rank == 0:
                    act(model, own, tmp_path, loader)
                model(ROWS).square().mean().backward()
                own.step()
                own.zero_grad()
        except CommunicationError as error:
            return f"{type(error).__name__} {error}"
        return ""

    for told in rd.run(be_rank, 2, "threads"):
        if keeps and act is call:  # its units stay for the pass that all make
            assert not told
            continue
        assert told.startswith("CollectiveMismatch"), told
        assert CALLS[act] in told


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("when", ["early", "last"])
def test_a_measure_that_raises_on_one_rank(strategy: str, when: str) -> None:
    def be_rank(comm: Any) -> str:
        comm.timeout = 30
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        own: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, own = rd.prepare(model, own, strategy=strategy, comm=comm)
        seen = 0

        def measure(one: Any, rows: Any) -> Any:
            nonlocal seen
            seen += 1
            found = one(rows).mean()
            if comm.rank == 1 and seen == (1 if when == "early" else 4):
                raise ValueError("no such number")
            return found

        try:
            rd.evaluate(model, rd.loader(ROWS, batch_size=2, comm=comm), measure)
        except (ValueError, RoundelayError) as error:
            if when == "last":  # when all have come by the same units, training goes on
                model(ROWS).square().mean().backward()
                own.step()
            return f"{type(error).__name__} {error}"
        return ""

    zero, one = rd.run(be_rank, 2, "threads")
    assert one == "ValueError no such number"
    assert zero.startswith("CollectiveMismatch")
    assert "rank 1" in zero
    assert "evaluate" in zero
