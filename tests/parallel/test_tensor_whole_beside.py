"""What all ranks have whole, beside what layers leave cut: gradients are one device's, or refused.

A number that is computed of a parameter, an input with a graph, what the model got from outside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import InvalidArgumentError
from roundelay.parallel.functions import copy as brought_in

torch = pytest.importorskip("torch")

from tests.parallel.conftest import sharded_whole  # noqa: E402 - only with torch

nn = torch.nn
WIDTH, INNER = 4, 6
PLAN = {"up": "column", "down": "row", "norm": "norm"}

#: Numbers of a parameter, of which ranks have parts.
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.norm(),
    "sum of squares": lambda p: p.square().sum(),
    "largest": lambda p: p.abs().max(),
    "mean": lambda p: p.mean() + 2,
    "one element": lambda p: p[(0,) * p.dim()],
    "stacked": lambda p: torch.stack([p.norm(), p.abs().mean()]).sum(),
    "spectral": lambda p: torch.linalg.matrix_norm(p.view(1, -1), 2),
}
PARAMETERS = ("up.weight", "up.bias", "down.weight")
#: How a number that is whole is used with activations.
USES: dict[str, Callable[[Any, Any], Any]] = {
    "times": lambda u, n: u * n,
    "divided": lambda u, n: u / n,
    "added": lambda u, n: u + n,
    "where": lambda u, n: torch.where(u > 0, u, u * n),
    "filled": lambda u, n: u.masked_fill(u < 0, n),
    "lerp": lambda u, n: torch.lerp(u, 2 * u, n),
    "least": lambda u, n: torch.minimum(u, n * 0.1),
    "power": lambda u, n: (u.abs() + 1).pow(n),
    "in a function": lambda u, n: u * torch.sigmoid(u * n),
}
#: Where: beside cut features, there once it was brought in, and where activations are whole.
PLACES = {"beside": "refused", "brought in": "right", "before": "right", "after": "right"}


class Model(nn.Module):  # type: ignore[misc, name-defined]
    """A perceptron with something beside its features, before it, or after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.use: Callable[[Any, Any], Any] = USES["times"]
        self.place, self.comm = "after", None

    def forward(self, x: Any, beside: Callable[..., Any], *more: Any) -> Any:
        """Use what `beside` makes of the model and its inputs."""
        made = beside(self, x, *more)
        y = self.norm(self.use(x, made) if self.place == "before" else x)
        inner = torch.tanh(self.up(y))
        if self.place == "brought in" and self.comm is not None:
            inner = self.use(inner, brought_in(made, self.comm))
        elif self.place in ("beside", "brought in"):
            inner = self.use(inner, made)
        out = self.down(inner)
        return self.use(out, made) if self.place == "after" else x + out


torch.manual_seed(6)
START = Model().double()


def start(place: str, use: str) -> Any:
    model = copy.deepcopy(START)
    model.place, model.use = place, USES[use]
    return model


X = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(model: Any, beside: Any, inputs: Any = (X,), more: Any = ()) -> list[Any]:
    """Return output and gradients, whole, of a loss that tells rows and features apart."""
    out = model(inputs[0], beside, *inputs[1:])
    (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()).sum().backward()
    return [out.detach(), *map(sharded_whole, model.parameters()), *(one.grad for one in more)]


def of(name: str, number: str) -> Callable[[Any, Any], Any]:
    return lambda model, _: NUMBERS[number](model.get_parameter(name))


def said(comm: rd.Communicator, cell: tuple[str, str, str, str]) -> str:
    """Say what comes of a number of a parameter at some place."""
    place, use, name, number = cell
    model = start(place, use)
    mesh = rd.Mesh(tp=comm.size, comm=comm)
    rd.apply_plan(model, PLAN, mesh)
    model.comm = mesh["tp"]
    try:
        found = gradients(model, of(name, number))
    except InvalidArgumentError as error:
        told = f"{name}, which the {comm.size} ranks of tp have whole, meets features"
        return "refused" if told in str(error) else str(error)
    due = gradients(start(place, use), of(name, number))
    right = all(torch.allclose(*both, rtol=1e-10) for both in zip(found, due, strict=True))
    return "right" if right else "wrong"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_numbers_of_divided_parameters_are_whole(place: str, size: int, sample: Any) -> None:
    cells = sample.cells(product([place], USES, PARAMETERS, NUMBERS), 4)

    def body(comm: rd.Communicator) -> list[str]:
        return [said(comm, cell) for cell in cells]

    for verdicts in rd.run(body, size, "threads"):
        for cell, verdict in zip(cells, verdicts, strict=True):
            assert verdict == PLACES[place], (cell, verdict)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "ps"])
@pytest.mark.parametrize("place", PLACES)
def test_so_they_are_in_a_prepared_model(place: str, strategy: str) -> None:
    def penalized(model: Any, _: Any) -> Any:
        return model.up.weight.norm()

    def body(comm: rd.Communicator | None) -> Any:
        model: Any = start(place, "times")
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if comm is not None:
            mesh = rd.Mesh(tp=comm.size, comm=comm)
            model, optimizer = rd.prepare(model, optimizer, mesh=mesh, plan=PLAN, strategy=strategy)
            model.comm = mesh["tp"]
        try:
            for _ in range(3):
                optimizer.zero_grad()
                model(X, penalized).square().sum().backward()
                optimizer.step()
        except InvalidArgumentError:
            return "refused"
        state = model.state_dict() if comm is None else rd.full_state_dict(model)
        return {name: tensor.clone() for name, tensor in state.items()}

    due = body(None)
    for found in rd.run(body, 2, "threads"):
        if PLACES[place] == "refused":
            assert found == "refused"
        else:
            torch.testing.assert_close(found, due, rtol=1e-10, atol=1e-12)


class Source:
    """What the model is given that has a graph, and what is used beside features."""

    def __init__(self, name: str) -> None:
        x, outside = X.clone().requires_grad_(), copy.deepcopy(ENCODER)
        scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        column = torch.ones(3, 1, dtype=torch.float64, requires_grad=True)
        encoded, weights = outside(X), [*outside.parameters()]
        made: dict[str, tuple[Any, Any, Any]] = {
            "input by row": ((x,), lambda _, x: x[..., :1], [x]),
            "mean of the input": ((x,), lambda _, x: x.mean(), [x]),
            "number": ((X, scale), lambda _, __, scale: scale, [scale]),
            "column": ((X, column), lambda _, __, column: column, [column]),
            "both": ((x, scale), lambda _, x, scale: x[..., :1] * scale, [x, scale]),
            "encoded by row": ((encoded,), lambda _, x: x[..., :1], weights),
            "number of the encoder": ((X, encoded.mean()), lambda _, __, mean: mean, weights),
        }
        self.inputs, self.beside, self.leaves = made[name]


ONE = torch.ones((), dtype=torch.float64)
ENCODER = nn.Linear(WIDTH, WIDTH).double()
SOURCES = ["input by row", "mean of the input", "number", "column", "both", "encoded by row",
           "number of the encoder"]  # fmt: skip


def told_of_source(comm: rd.Communicator, cell: tuple[str, str, str, bool]) -> str:
    """Say what comes of a tensor that the model is given."""
    place, use, name, hooked = cell
    model, source = start(place, use), Source(name)
    mesh = rd.Mesh(tp=comm.size, comm=comm)
    rd.apply_plan(model, PLAN, mesh)
    model.comm = mesh["tp"]
    for module in model.children() if hooked else ():  # by which torch puts nodes in between
        module.register_full_backward_hook(lambda *_: None)
    try:
        model(X, lambda *_: ONE)  # which is right, and of another kind: no graph comes in
        found = gradients(model, source.beside, source.inputs, source.leaves)
    except InvalidArgumentError as error:
        told = f"which the {comm.size} ranks of tp have whole, meets features"
        return "refused" if told in str(error) else str(error)
    other = Source(name)
    due = gradients(start(place, use), other.beside, other.inputs, other.leaves)
    right = all(torch.allclose(*both, rtol=1e-10) for both in zip(found, due, strict=True))
    return "right" if right else "wrong"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of what gets no graph
@pytest.mark.parametrize("place", PLACES)
def test_what_comes_from_outside_is_whole(place: str, size: int, sample: Any) -> None:
    uses = [one for one in USES if one not in ("filled", "lerp", "power")]  # of numbers, above
    cells = sample.cells(product([place], uses, SOURCES, [False, True]), 4)

    def body(comm: rd.Communicator) -> list[str]:
        return [told_of_source(comm, cell) for cell in cells]

    for verdicts in rd.run(body, size, "threads"):
        for cell, verdict in zip(cells, verdicts, strict=True):
            assert verdict == PLACES[place], (cell, verdict)
