"""Penalties on weights of which ranks have parts: what one device's loss would make of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import roundelay as rd
from roundelay.parallel.expert import average_gradients
from roundelay.parallel.sharding import sharding_of

torch = pytest.importorskip("torch")
nn: Any = torch.nn

WIDTH, STEPS, ROWS = 4, 3, 8


def expert() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH))


class Mixture(nn.Module):  # type: ignore[misc]
    def __init__(self, comm: Any = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.moe = rd.MoE([expert() for _ in range(4)], rd.Router(WIDTH, 4), comm)

    def forward(self, x: Any) -> Any:
        return x + self.moe(self.first(x))


class Perceptron(nn.Module):  # type: ignore[misc]
    def __init__(self, comm: Any = None) -> None:  # noqa: ARG002 - as the other one
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.down(torch.tanh(self.up(x)))


PENALTIES: dict[str, Callable[[Any], Any]] = {
    "l2": lambda p: p.square().sum(),
    "l1": lambda p: p.abs().sum(),
    "norm": lambda p: p.norm(),
    "mean": lambda p: p.square().mean(),
}
MESHES: list[tuple[Any, dict[str, int], str, Any]] = [
    (Mixture, {"ep": 2}, "ddp", None),
    (Mixture, {"ep": 3}, "ddp", None),
    (Mixture, {"dp": 2, "ep": 2}, "zero2", None),
    (Mixture, {"dp": 2, "ep": 2}, "zero3", None),
    (Perceptron, {"tp": 2}, "ddp", {"up": "column", "down": "row"}),
    (Perceptron, {"dp": 2, "tp": 2}, "zero2", {"up": "column", "down": "row"}),
]


def batches() -> list[Any]:
    rows = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=rows).double() for _ in range(STEPS)]


def start_of(kind: Any) -> Any:
    torch.manual_seed(0)
    return kind().double()


def penalized(model: Any, x: Any, share: float, penalty: Callable[[Any], Any]) -> Any:
    return model(x).square().sum() * share + 0.1 * sum(map(penalty, model.parameters()))


def alone(kind: Any, penalty: Callable[[Any], Any]) -> Any:
    model = start_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in batches():
        optimizer.zero_grad()
        penalized(model, x, 1 / ROWS, penalty).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize(("kind", "axes", "strategy", "plan"), MESHES, ids=str)
def test_a_penalty_counts_once(
    kind: Any, axes: dict[str, int], strategy: str, plan: Any, name: str
) -> None:
    expected, start = alone(kind, PENALTIES[name]), start_of(kind).state_dict()

    def body(comm: rd.Communicator) -> None:
        mesh: Any = rd.Mesh(comm=comm, **axes)
        model = kind(mesh["ep"] if "ep" in axes else None).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if plan is not None:
            model.load_state_dict(start)
        model, optimizer = rd.prepare(model, optimizer, mesh=mesh, strategy=strategy, plan=plan)
        if plan is None:
            model.load_state_dict(start)
        data = mesh["dp", "ep"] if {"dp", "ep"} <= axes.keys() else mesh[next(iter(axes))]
        size, rank = (1, 0) if axes.keys() == {"tp"} else (data.size, data.rank)
        for x in batches():
            optimizer.zero_grad()
            mine = x.tensor_split(size)[rank]
            penalized(model, mine, size / ROWS, PENALTIES[name]).backward()
            optimizer.step()
        for key, value in rd.full_state_dict(model).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-11, atol=1e-12)

    size = 1
    for length in axes.values():
        size *= length
    rd.run(body, size, "threads")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_does_without_prepare(size: int) -> None:
    """With gradients by `average_gradients`, also of a copy, and of experts that were frozen."""
    expected, start = alone(Mixture, PENALTIES["l2"]), start_of(Mixture).state_dict()

    def body(comm: rd.Communicator) -> None:
        layer = Mixture(comm).double()
        layer.load_state_dict(start)
        for model in (
            layer,
            copy.deepcopy(layer),
            copy.deepcopy(layer).requires_grad_(requires_grad=False),
        ):
            model.requires_grad_()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for x in batches():
                optimizer.zero_grad()
                mine = x.tensor_split(size)[comm.rank]
                penalized(model, mine, size / ROWS, PENALTIES["l2"]).backward()
                average_gradients(model, comm)
                optimizer.step()
            for key, value in model.named_parameters():
                cut = sharding_of(value)
                whole = value.detach() if cut is None else cut.whole(value)
                torch.testing.assert_close(whole, expected[key], rtol=1e-11, atol=1e-12)
            model.load_state_dict(start)

    rd.run(body, size, "threads")
