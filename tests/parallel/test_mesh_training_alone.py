"""Meshes whose ranks all have the same data: nothing is averaged, and all else holds as ever."""

from __future__ import annotations

from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from tests.parallel.mesh_models import STRATEGIES  # noqa: E402 - only with torch

from roundelay.errors import NotFiniteError, RankFailed  # noqa: E402 - likewise

nn = torch.nn
AXES: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"dp": 1, "tp": 2}]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_gradients_that_are_not_finite_are_told_on_every_rank(axes: dict[str, int]) -> None:
    def bad(output: Any, target: Any) -> Any:
        return (output - target).square().mean() * float("nan")

    def one(comm: Any, strategy: str) -> tuple[str, bool]:
        mesh = rd.Mesh(comm=comm, **axes)
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        x, plan = torch.ones(4, 4), {"0": "column", "2": "row"} if "tp" in axes else None
        if "pp" in axes:
            model = rd.Pipeline(model, comm=mesh["pp"], micro_batches=2, loss=bad)
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _ = rd.prepare(model, own, mesh=mesh, strategy=strategy, plan=plan)
        before = rd.full_state_dict(model)
        told = "nothing"
        try:
            model.step(x, x) if "pp" in axes else bad(model(x), x).backward()
        except (NotFiniteError, RankFailed) as error:
            told = str(error)
        after = rd.full_state_dict(model)
        return told, all(torch.equal(value, after[name]) for name, value in before.items())

    def body(comm: Any) -> dict[str, tuple[str, bool]]:
        return {strategy: one(comm, strategy) for strategy in STRATEGIES}

    ranks = int(torch.tensor([*axes.values()]).prod())
    for found in rd.run(body, ranks, "threads"):
        for strategy, (told, same) in found.items():
            assert "weight" in told, (strategy, told)
            assert same, strategy


def test_one_rank_without_a_mesh_does_not_look() -> None:
    """It would cost a step a pass over all gradients, and torch alone does not look either."""

    def body(comm: Any) -> bool:
        model = nn.Linear(2, 2)
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = rd.prepare(model, own, comm=comm, strategy="ddp")
        (model(torch.ones(1, 2)).sum() * float("nan")).backward()
        optimizer.step()
        return bool(model.weight.isnan().all())

    assert rd.run(body, 1, "threads") == [True]
