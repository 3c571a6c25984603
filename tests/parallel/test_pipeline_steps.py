"""Stages of a pipeline step together, by the same rates, or all ranks are told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch

torch = pytest.importorskip("torch")
nn: Any = torch.nn

MESHES: list[dict[str, int]] = [{"pp": 2}, {"dp": 2, "pp": 2}]


def told_of(axes: dict[str, int], mistake: Callable[[Any, int], bool], *, groups: bool) -> Any:
    """Train three steps, with something of one rank's own in the second; return what was told."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    x, target = torch.randn(8, 4).double(), torch.randn(8, 4).double()

    def body(comm: rd.Communicator) -> str:
        mesh: Any = rd.Mesh(comm=comm, **axes)
        pipe: Any = rd.Pipeline(
            copy.deepcopy(model), comm=mesh["pp"], loss=nn.functional.mse_loss, micro_batches=2
        )
        rate = 0.1 / (1 + groups * mesh.place["pp"])
        optimizer: Any = torch.optim.SGD([{"params": [*pipe.parameters()], "lr": rate}], lr=0.1)
        pipe, optimizer = rd.prepare(pipe, optimizer, mesh=mesh)
        try:
            for step in range(3):
                optimizer.zero_grad()
                pipe.step(x[:4], target[:4])
                if step != 1 or not mistake(optimizer, comm.rank):
                    optimizer.step()
            rd.full_state_dict(pipe)
        except CollectiveMismatch as error:
            return str(error)
        return ""

    return rd.run(body, 2 * axes.get("dp", 1), "threads")


def leaves_out_a_step(_: Any, rank: int) -> bool:
    return rank % 2 == 1


def has_its_own_rate(optimizer: Any, rank: int) -> bool:
    optimizer.param_groups[0]["lr"] *= 0.5 if rank % 2 else 1
    return False


def forgets_gradients(optimizer: Any, rank: int) -> bool:
    if rank % 2:
        optimizer.zero_grad()
    return False


def clips_otherwise(optimizer: Any, rank: int) -> bool:
    optimizer.clip_grad_norm_(0.01 * (1 + rank % 2))
    return False


def clips_alone(optimizer: Any, rank: int) -> bool:
    if rank % 2:
        optimizer.clip_grad_value_(0.01)
    return False


def all_do_so(optimizer: Any, _: int) -> bool:
    optimizer.clip_grad_norm_(0.01)
    optimizer.clip_grad_value_(0.01)
    return False


def all_change_theirs(optimizer: Any, _: int) -> bool:
    optimizer.param_groups[0]["lr"] *= 0.5
    return False


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize(
    ("mistake", "word"),
    [
        (leaves_out_a_step, "as often"),
        (has_its_own_rate, "learning rate"),
        (forgets_gradients, "zero_grad"),
        (clips_otherwise, "same limits"),
        (clips_alone, "same limits"),
        (all_change_theirs, ""),
        (all_do_so, ""),
    ],
)
def test_all_are_told(axes: dict[str, int], mistake: Any, word: str) -> None:
    told = told_of(axes, mistake, groups=False)
    assert all(word in each and bool(each) == bool(word) for each in told), told


def test_rates_by_layer_change_together() -> None:
    """Stages may have other rates from the first; then all change them, or none."""
    assert told_of({"pp": 2}, all_change_theirs, groups=True) == ["", ""]
    told = told_of({"pp": 2}, has_its_own_rate, groups=True)
    assert all("learning rate" in each for each in told)


def test_gradients_that_one_stage_keeps_are_told() -> None:
    """It would add to them, and the others begin anew. A stage that is frozen has none to keep."""

    def body(comm: rd.Communicator, *, keeps: bool) -> str:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
        pipe: Any = rd.Pipeline(model, comm=comm, loss=nn.functional.mse_loss, micro_batches=2)
        optimizer: Any = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe, optimizer = rd.prepare(pipe, optimizer, mesh=rd.Mesh(pp=2, comm=comm))
        x = torch.ones(4, 4).double()
        try:
            for step in range(4):
                for parameter in pipe.parameters():
                    parameter.requires_grad_(keeps or step != 1 or comm.rank != 0)
                if step != 2 or not keeps or comm.rank:
                    optimizer.zero_grad()
                pipe.step(x, x)
                optimizer.step()
        except CollectiveMismatch as error:
            return str(error)
        return ""

    told = rd.run(lambda comm: body(comm, keeps=True), 2, "threads")
    assert all("zero_grad" in each for each in told), told
    assert rd.run(lambda comm: body(comm, keeps=False), 2, "threads") == ["", ""]
