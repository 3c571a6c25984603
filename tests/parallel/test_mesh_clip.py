"""Clipping that only some ranks of a mesh do is told by its name, and nobody waits for long."""

from __future__ import annotations

import copy
from math import prod
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
    ({"tp": 2, "pp": 2}, "pp"), ({"tp": 3}, "tp"), ({"dp": 2, "tp": 2}, "dp"),
    ({"dp": 2, "pp": 2}, "dp"), ({"dp": 2}, "dp"),
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
    assert any("clip_grad_norm_" in str(error) for error in told.values())


def halve(parameters: Any) -> None:
    for each in parameters:
        each.grad.mul_(0.5)


CHANGES: dict[str, Any] = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_([*parameters], 0.01),
    "half": halve,
    "value": lambda parameters: nn.utils.clip_grad_value_([*parameters], 0.01),
}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("axes", [{"pp": 2}, {"pp": 3}, {"dp": 2, "pp": 2}], ids=str)
def test_stages_that_clip_by_norms_of_their_own_are_told(
    axes: dict[str, int], strategy: str
) -> None:
    """And what each element can be done by itself is as on one device."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    x, y = torch.randn(2, 8, 4).double()
    mse = nn.functional.mse_loss

    def weights(change: Any) -> Any:
        alone = copy.deepcopy(model)
        optimizer = torch.optim.SGD(alone.parameters(), lr=1.0)
        for _ in range(2):
            optimizer.zero_grad()
            mse(alone(x), y).backward()
            change(alone.parameters())
            optimizer.step()
        return alone.state_dict()

    right = {word: weights(change) for word, change in CHANGES.items()}

    def train(mesh: rd.Mesh, word: str, steps: int) -> Any:
        pipe = rd.Pipeline(copy.deepcopy(model), comm=mesh["pp"], loss=mse, micro_batches=2)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
        pipe, optimizer = rd.prepare(pipe, optimizer, mesh=mesh, strategy=strategy)
        for _ in range(steps):
            optimizer.zero_grad()
            rows = [each.chunk(mesh.size("dp"))[mesh.place.get("dp", 0)] for each in (x, y)]
            pipe.step(*rows)
            CHANGES[word](pipe.parameters())
            optimizer.step()
        return rd.full_state_dict(pipe)

    def body(comm: rd.Communicator) -> None:
        comm.timeout = 10
        mesh = rd.Mesh(comm=comm, **axes)
        for steps in (1, 2):  # told by the state, and by the next step
            with pytest.raises(CollectiveMismatch, match=r"use optimizer\.clip_grad_norm_"):
                train(mesh, "norm", steps)
        for word in ("half", "value"):
            for name, value in train(mesh, word, 2).items():
                torch.testing.assert_close(value, right[word][name], rtol=1e-10, atol=1e-12)

    rd.run(body, prod(axes.values()), "threads")
