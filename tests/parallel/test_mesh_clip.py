"""Clipping that only some ranks of a mesh do is told by its name, and nobody waits for long."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch

torch = pytest.importorskip("torch")

nn = torch.nn
torch.manual_seed(0)
START = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
PLAN = {"0": "column", "1": "row", "2": "column", "3": "row"}


def trained(comm: rd.Communicator, strategy: str, axes: dict[str, int], who: str) -> None:
    """Take two steps; of the first, only the first rank along an axis clips gradients."""
    mesh = rd.Mesh(comm=comm, **axes)
    model: Any = copy.deepcopy(START)
    if "pp" in axes:
        model = rd.Pipeline(model, comm=mesh["pp"], micro_batches=2, loss=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, prepared = rd.prepare(
        model, optimizer, mesh=mesh, plan=PLAN if "tp" in axes else None, strategy=strategy
    )
    x = torch.ones(4, 4)
    for step in range(2):
        prepared.zero_grad()
        if "pp" in axes:
            model.step(x, x)
        else:
            model(x).square().mean().backward()
        if step == 0 and mesh.place[who] == 0:
            prepared.clip_grad_norm_(1.0)
        prepared.step()


@pytest.mark.filterwarnings("ignore:module forward hook")  # torch's, of a second error
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "ps"])
@pytest.mark.parametrize(("axes", "who"), [
    ({"dp": 2, "tp": 2}, "tp"), ({"dp": 2, "pp": 2}, "pp"), ({"tp": 2, "pp": 2}, "tp"),
    ({"tp": 2, "pp": 2}, "pp"), ({"tp": 3}, "tp"),
])  # fmt: skip
def test_clipping_by_some_ranks_is_told(axes: dict[str, int], who: str, strategy: str) -> None:
    told: dict[int, CollectiveMismatch] = {}

    def body(comm: rd.Communicator) -> None:
        with pytest.raises(CollectiveMismatch) as caught:
            trained(comm, strategy, axes, who)
        told[comm.rank] = caught.value

    size = 1
    for length in axes.values():
        size *= length
    rd.run(body, size, "threads")
    assert len(told) == size
    assert any("This rank was in clip_grad_norm_" in str(error) for error in told.values())
