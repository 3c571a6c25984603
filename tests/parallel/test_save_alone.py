"""`rd.save` on one rank of a mesh: all are told at once, and none waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch

torch = pytest.importorskip("torch")
nn: Any = torch.nn


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_all_are_told(axis: str, tmp_path: Path) -> None:
    def body(comm: rd.Communicator) -> None:
        mesh: Any = rd.Mesh(comm=comm, **{axis: 2})
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if axis == "pp":
            model = rd.Pipeline(model, comm=comm, loss=nn.functional.mse_loss, micro_batches=2)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = {"0": "column", "1": "row"} if axis == "tp" else None
        model, optimizer = rd.prepare(model, optimizer, mesh=mesh, plan=plan)
        if comm.rank:
            rd.save(tmp_path / "checkpoint", model, optimizer)
        elif axis == "pp":
            model.step(torch.ones(4, 4), torch.ones(4, 4))
        else:
            model(torch.ones(4, 4)).sum().backward()

    with pytest.raises(CollectiveMismatch):
        rd.run(body, 2, "threads", timeout=60)
