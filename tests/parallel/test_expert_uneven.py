"""Experts learn as on one device from batches that a loader can't deal out evenly."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

nn = torch.nn
torch.manual_seed(0)
EXPERTS = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double() for _ in range(4)]
ROUTER, FIRST = rd.Router(4, 4, top_k=2).double(), nn.Linear(4, 4).double()
WAYS = [({"ep": 2}, "ddp"), ({"ep": 3}, "ddp"), ({"dp": 2, "ep": 2}, "ddp"),
        ({"dp": 2, "ep": 2}, "zero1"), ({"dp": 2, "ep": 2}, "zero2"),
        ({"dp": 2, "ep": 2}, "zero3")]  # fmt: skip


def built(comm: rd.Communicator | None = None) -> Any:
    mixture = rd.MoE(copy.deepcopy(EXPERTS), copy.deepcopy(ROUTER), comm)
    return nn.Sequential(copy.deepcopy(FIRST), mixture)


def trained(model: Any, optimizer: Any, batches: Any) -> None:
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("rows", [1, 5, 7, 12])
@pytest.mark.parametrize(("axes", "strategy"), WAYS, ids=str)
def test_uneven_batches_are_exact(axes: dict[str, int], rows: int, strategy: str) -> None:
    """Also where a rank has no row, and other ranks' tokens come to its experts."""
    x = torch.randn(2 * rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone = built()
    trained(alone, torch.optim.SGD(alone.parameters(), lr=0.5), x.split(rows))
    wanted = alone.state_dict()

    def body(comm: rd.Communicator) -> None:
        mesh = rd.Mesh(comm=comm, **axes)
        model = built(mesh["ep"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = rd.prepare(model, optimizer, mesh=mesh, strategy=strategy)
        trained(model, optimizer, rd.loader(x, rows, mesh=mesh, shuffle=False, quiet=True))
        for name, found in rd.full_state_dict(model).items():
            torch.testing.assert_close(found, wanted[name], rtol=1e-11, atol=1e-13)

    rd.run(body, prod(axes.values()), "threads")
