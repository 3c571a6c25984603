"""A number in a model's code is one device's; a length that it reads off a part is that part's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.parallel.conftest import outcome_of

import roundelay as rd
from roundelay.errors import InvalidArgumentError

torch = pytest.importorskip("torch")

from roundelay.parallel._cut_length import Length  # noqa: E402 - only with torch

nn, F = torch.nn, torch.nn.functional
ROWS, TOKENS, WIDTH, DIM = 2, 12, 12, 2
X = torch.linspace(-1, 1, ROWS * TOKENS * WIDTH).view(ROWS, TOKENS, WIDTH).double().sin()

Between = Callable[[Any], Any]


def changed(x: Any, change: Callable[[Any], Any]) -> Any:
    new = x.clone()
    change(new)
    return new


def numbered(pieces: Any, dim: int) -> Any:
    return torch.cat([piece.tanh() * (at + 1) for at, piece in enumerate(pieces)], dim)


def heads(x: Any) -> Any:
    return x.unflatten(-1, (-1, DIM))


#: What takes a number, and a dim: along features or tokens.
BY_NUMBER: dict[str, Any] = {
    "split": lambda x, n, at: numbered(x.split(n, at), at),
    "unsafe split": lambda x, n, at: numbered(x.unsafe_split(n, at), at),
    "split twice": lambda x, n, at: numbered(x.split([n, x.size(at) - n], at), at),
    "last": lambda x, n, at: changed(x, lambda y: y[index(at, slice(-n, None))].mul_(2)),
    "set": lambda x, n, at: changed(x, lambda y: y.__setitem__(index(at, slice(n)), 0.0)),
    "set to a tensor": lambda x, n, at: changed(
        x, lambda y: y.__setitem__(index(at, slice(n)), torch.tensor(2.0))
    ),
    "zeroed": lambda x, n, at: changed(x, lambda y: y[index(at, slice(n))].zero_()),
    "narrow": lambda x, n, at: changed(x, lambda y: y.narrow(at, 0, n).mul_(2)),
    "view": lambda x, n, at: x.view(*grouped(n, at)).cumsum(at - 1).view_as(x),
    "view of all": lambda x, n, at: x.view(*grouped(n, at)[1:]).cumsum(0).view_as(x),
}  # fmt: skip
#: The same by lengths that are read off, along features and along tokens.
BY_LENGTH: dict[str, Callable[[Any, int], Any]] = {
    "split": lambda x, at: numbered(x.split(x.shape[at], at), at),
    "some": lambda x, at: x[index(at, slice(x.size(at)))] * 2,
    "from the end": lambda x, at: x[index(at, slice(-x.shape[at], None))].sigmoid(),
    "too many": lambda x, at: x[index(at, slice(2 * x.shape[at]))].sigmoid(),
    "set": lambda x, at: changed(
        x, lambda y: y.__setitem__(index(at, slice(0, x.shape[at])), 0.5)
    ),
    "narrow": lambda x, at: x.narrow(at, 0, x.size(at)).cos(),
    "rows": lambda x, at: x.reshape(-1, *x.shape[at:]).tanh().view(x.shape),
    "its shape": lambda x, _: x.mT.reshape(x.shape[0], x.shape[2], x.size(1)).tanh().mT,
}  # fmt: skip
#: Single heads, of which each rank has other ones.
HEADS: dict[str, Between] = {
    "first set": lambda x: changed(heads(x), lambda y: y.__setitem__((..., 0, slice(None)), 0.0))
    .flatten(-2),
    "first zeroed": lambda x: changed(heads(x), lambda y: y[..., 0, :].zero_()).flatten(-2),
    "last doubled": lambda x: changed(heads(x), lambda y: y.unbind(-2)[-1].mul_(2)).flatten(-2),
}  # fmt: skip


def index(at: int, of: slice) -> tuple[Any, ...]:
    return (..., of, *[slice(None)] * (-at - 1))


def grouped(n: int, at: int) -> tuple[int, ...]:
    """Return a shape in which so many elements of the dim have become one."""
    return (ROWS, -1, n) if at == -1 else (1, -1, n, WIDTH)


class Model(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, features: Between | None = None, tokens: Between | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Identity(), nn.LayerNorm(WIDTH).double()
        self.up, self.down, self.head = (nn.Linear(WIDTH, WIDTH).double() for _ in range(3))
        self.features, self.tokens = features or torch.tanh, tokens or torch.tanh

    def forward(self, x: Any) -> Any:
        x = self.tokens(self.norm(self.first(x)))
        return self.head(x + self.down(self.features(self.up(x))))


PLAN = {"first": "split", "norm": "norm", "up": "column:2", "down": "row:2",
        "head": "column gather"}  # fmt: skip


def outcome(model: Any) -> list[Any]:
    out = model(X)
    return outcome_of(model, out, (out * X).sum())


def verdicts(models: list[Any], size: int, plan: dict[str, str] | None = None) -> list[set[str]]:
    """Say what ranks make of each model: 'refused', 'right' or 'wrong'."""
    wanted = []
    for model in models:
        try:
            wanted.append(outcome(copy.deepcopy(model)))
        except (RuntimeError, ValueError):
            wanted.append([])  # of one device, too

    def body(comm: rd.Communicator) -> list[str]:
        return [said(comm, start, values) for start, values in zip(models, wanted, strict=True)]

    def said(comm: rd.Communicator, start: Any, values: list[Any]) -> str:
        model = copy.deepcopy(start)
        divided = plan is None and start.tokens is not torch.tanh
        mesh = rd.Mesh(tp=size, comm=comm)
        rd.apply_plan(model, plan or PLAN, mesh, sequence_parallel=divided)
        try:
            found = outcome(model)
        except InvalidArgumentError:
            return "refused"
        if not values:
            return "wrong"
        off = max((a - b).abs().max() for a, b in zip(found, values, strict=True))
        return "right" if off <= 1e-12 * max(b.abs().max() for b in values) else "wrong"

    return [{*each} for each in zip(*rd.run(body, size, "threads"), strict=True)]


def between(function: Between, dim: int) -> Any:
    return Model(features=function) if dim == -1 else Model(tokens=function)


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", BY_NUMBER)
def test_numbers_are_those_of_one_device(name: str, size: int, dim: int) -> None:
    """Whatever number a selection has, it is right or refused, by all ranks alike."""
    numbers = [1, 2, 3, 4, 5, 6, 8, 11, 12, 13]
    models = [between(partial(BY_NUMBER[name], n=n, at=dim), dim) for n in numbers]
    for number, found in zip(numbers, verdicts(models, size), strict=True):
        assert found in ({"right"}, {"refused"}), (number, found)


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("name", BY_LENGTH)
def test_lengths_that_are_read_off_are_followed(name: str, dim: int) -> None:
    model = between(lambda x: BY_LENGTH[name](x, dim), dim)
    for size in (2, 3):
        assert verdicts([model], size) == [{"right"}]


#: Single elements of a dim, in turn: as many as this rank has.
IN_TURN: dict[str, Between] = {
    "unbind": lambda x: [*x.unbind(0)],
    "loop": lambda x: [*x],
    "indices": lambda x: [x[at] for at in range(x.shape[0])],
    "select": lambda x: [x.select(0, at) for at in range(len(x))],
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("word", ["column", "column:2"])
@pytest.mark.parametrize("name", IN_TURN)
def test_heads_are_taken_in_turn_and_features_are_not(name: str, word: str, size: int) -> None:
    plan = {"first": "replicate", "norm": "replicate", "head": "replicate", "up": word,
            "down": word.replace("column", "row")}  # fmt: skip

    def by_heads(x: Any) -> Any:
        each = IN_TURN[name](heads(x).movedim(-2, 0))
        return torch.stack([head.softmax(-1) for head in each], -2).flatten(-2)

    def by_features(x: Any) -> Any:
        return torch.stack([one * at for at, one in enumerate(IN_TURN[name](x.movedim(-1, 0)))], -1)

    found = verdicts([Model(by_heads), Model(by_features)], size, plan)
    assert found == [{"right"}, {"refused"}]


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_changed_would_be_one_of_every_rank(name: str) -> None:
    for size in (2, 3):
        assert verdicts([Model(HEADS[name])], size) == [{"refused"}]


class Fused(nn.Module):  # type: ignore[misc, name-defined]
    """Queries, keys and values of one layer, taken apart."""

    def __init__(self, apart: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.dim, self.inner, self.apart = 6, 2, WIDTH, apart
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Any) -> Any:
        parts = self.apart(self, self.all(x))
        q, k, v = (part.unflatten(-1, (-1, self.dim)).transpose(1, 2) for part in parts[:3])
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def spans(y: Any, length: int) -> list[Any]:
    return [y[..., at * length : (at + 1) * length] for at in range(3)]


def pieces(n: int, _: Any, y: Any) -> Any:
    """Weigh pieces by their numbers before it is taken apart."""
    return numbered(y.split(n, -1), -1).chunk(3, -1)


#: How queries, keys and values are taken apart, and in which plans that must be taken.
APART: dict[str, tuple[Callable[[Any, Any], Any], set[str]]] = {
    "chunk": (lambda _, y: y.chunk(3, -1), {"qkv", "region"}),
    "thirds": (lambda _, y: y.split(y.shape[-1] // 3, -1), {"qkv", "region"}),
    "spans of thirds": (lambda _, y: spans(y, y.size(-1) // 3), {"qkv", "region"}),
    "split": (lambda m, y: y.split(m.inner, -1), {"region"}),
    "spans": (lambda m, y: spans(y, m.heads * m.dim), {"region"}),
    "number": (lambda _, y: y.split(WIDTH, -1), set()),
    **{f"by {n}": (partial(pieces, n), set()) for n in (1, 2, 4, 6, 9, 18, 24)},
}
FUSED = {"all": "qkv:dim", "out": "row:dim"}
PLANS = {"qkv": FUSED, "region": FUSED | {"": "region:heads,inner"}}


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("name", APART)
def test_what_is_fused_is_taken_apart_or_refused_by_all(name: str, size: int) -> None:
    apart, taken = APART[name]
    for called, plan in PLANS.items():
        if called == "region" and name.startswith("by "):  # may be what it counts
            continue
        (found,) = verdicts([Fused(apart)], size, plan)
        assert found == ({"right"} if called in taken else {"refused"}), (called, found)


def test_a_length_is_a_number_of_which_copies_are_plain() -> None:
    here, whole = Length(4, 8), 8
    for one, other in ((here // 2, whole // 2), (3 * here + 1, 3 * whole + 1), (12 - here, 4),
                       (-here, -whole), (here - here // 4, 6), (1 + here * here, 65)):  # fmt: skip
        assert isinstance(one, Length)
        assert one.whole == other
    assert type(copy.deepcopy(here)) is type(pickle.loads(pickle.dumps(here))) is int
    assert (here / 2, here * [1], f"{here}", here) == (2.0, [1] * 4, "4", 4)
