"""What ranks of tp have whole gets the same gradient on each, or the step is refused on all."""

from __future__ import annotations

from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch

torch = pytest.importorskip("torch")

nn, F = torch.nn, torch.nn.functional
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "ps")
PLAN = {"norm": "norm", "up": "column", "down": "row", "head": "replicate"}


class Model(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 16)
        self.down, self.head = nn.Linear(16, 8), nn.Linear(8, 4)
        self.drop = 0.0

    def forward(self, x: Any) -> Any:
        return self.head(F.dropout(x + self.down(torch.relu(self.up(self.norm(x)))), self.drop))


def rows(step: int, here: int, _model: Any, x: Any) -> Any:
    return x + 1 if step == 2 and here else x


def dropout(step: int, _here: int, model: Any, x: Any) -> Any:
    model.drop = 0.3 if step == 2 else 0.0
    return x


def nothing(_step: int, _here: int, _model: Any, x: Any) -> Any:
    return x


def as_it_is(_step: int, _here: int, _model: Any, loss: Any) -> Any:
    return loss


def times_two(step: int, here: int, _model: Any, loss: Any) -> Any:
    return loss * 2 if step == 2 and here else loss


def by_a_part(step: int, _here: int, model: Any, loss: Any) -> Any:
    # A sum: means of two parts may by chance be as good as the same.
    return loss * (1 + rd.local(model.up.weight).sum()) if step == 2 else loss


#: What is done to rows and to the loss; all but the first must be refused in step 2.
WAYS = {
    "nothing": (nothing, as_it_is),
    "other rows": (rows, as_it_is),
    "masks": (dropout, as_it_is),
    "another loss": (nothing, times_two),
    "a loss of a part": (nothing, by_a_part),
}


def refused_in(comm: rd.Communicator, strategy: str, way: str) -> int | None:
    """Train; return the step that was refused."""
    mesh = rd.Mesh(dp=comm.size // 2, tp=2, comm=comm)
    here, (change, weigh) = mesh.place["tp"], WAYS[way]
    model: Any = Model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = rd.prepare(model, optimizer, mesh=mesh, plan=PLAN, strategy=strategy)
    generator = torch.Generator().manual_seed(mesh.place["dp"])
    for step in range(4):
        x = change(step, here, model, torch.randn(4, 3, 8, generator=generator))
        try:
            weigh(step, here, model, model(x).square().mean()).backward()
        except CollectiveMismatch as error:
            assert "The gradient of " in str(error)
            return step
        optimizer.step()
        optimizer.zero_grad()
    return None


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_drift_apart_are_told(way: str, strategy: str, size: int) -> None:
    found = rd.run(lambda comm: refused_in(comm, strategy, way), size, "threads")
    assert set(found) == {None if way == "nothing" else 2}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_not_refused(precision: str) -> None:
    def body(comm: rd.Communicator) -> None:
        mesh = rd.Mesh(tp=2, comm=comm)
        model: Any = Model()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = rd.prepare(
            model, optimizer, mesh=mesh, plan=PLAN, strategy="ddp", precision=precision
        )
        for _ in range(3):
            rd.backward(model(torch.ones(4, 3, 8)).square().mean(), weight=4)
            optimizer.step()
            optimizer.zero_grad()

    rd.run(body, 2, "threads")
