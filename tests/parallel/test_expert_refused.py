"""A mixture that can't be made is refused on every rank, by name, before any token moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch, InvalidArgumentError

torch = pytest.importorskip("torch")
nn = torch.nn

from roundelay.parallel.expert import balance_loss  # noqa: E402 - only with torch


def linear() -> Any:
    return nn.Linear(3, 3)


WRONG: dict[str, Callable[[rd.Communicator], Any]] = {
    "more than 1 experts": lambda comm: rd.MoE(linear, rd.Router(3, 1, top_k=1), comm),
    "has 3 experts, and its router 4": lambda comm: rd.MoE(
        [linear()] * 3, rd.Router(3, 4), comm),
    "not built like expert 0": lambda comm: rd.MoE(
        [linear(), nn.Linear(3, 3, bias=False)], rd.Router(3, 2), comm),
    "has buffers": lambda comm: rd.MoE(lambda: nn.BatchNorm1d(3), rd.Router(3, 2), comm),
    "nothing to divide": lambda comm: rd.MoE(nn.Tanh, rd.Router(3, 2), comm),
    "needs an rd.Router": lambda comm: rd.MoE(linear, nn.Linear(3, 2), comm),
    "needs modules": lambda comm: rd.MoE([1, 2], rd.Router(3, 2), comm),  # type: ignore[list-item]
    "not Linear": lambda comm: rd.MoE(linear(), rd.Router(3, 2), comm),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_refused_on_every_rank(words: str) -> None:
    def body(comm: rd.Communicator) -> None:
        with pytest.raises(InvalidArgumentError, match="MoE") as caught:
            WRONG[words](comm)
        if words != "not Linear":
            assert words in str(caught.value)

    rd.run(body, 2, "threads")


def test_ranks_that_differ_are_told() -> None:
    def other(comm: rd.Communicator) -> None:
        with pytest.raises(CollectiveMismatch, match="top_k=1"):
            rd.MoE(linear, rd.Router(3, 4, top_k=1 + comm.rank), comm)

    def wrong(comm: rd.Communicator) -> str:
        with pytest.raises(rd.RoundelayError) as caught:
            rd.MoE(linear, rd.Router(3, 4), comm) if comm.rank else rd.MoE(
                [linear()], rd.Router(3, 4), comm
            )
        return type(caught.value).__name__

    rd.run(other, 2, "threads")
    assert rd.run(wrong, 2, "threads") == ["InvalidArgumentError", "CollectiveMismatch"]


def test_the_router_is_that_of_rank_0() -> None:
    def body(comm: rd.Communicator) -> None:
        router = rd.Router(3, 4)
        with torch.no_grad():
            router.score.weight.fill_(comm.rank + 1)
        layer = rd.MoE(linear, router, comm)
        assert torch.equal(layer.router.score.weight, torch.ones(4, 3))

    rd.run(body, 3, "threads")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": 5}, "best 5 of 4 experts"),
        ({"top_k": 1.0}, "top_k"),
        ({"experts": 0}, "experts"),
        ({"width": -1}, "width"),
        ({"capacity_factor": 0}, "capacity_factor"),
        ({"capacity_factor": float("nan")}, "capacity_factor"),
        ({"capacity_factor": float("inf")}, "capacity_factor"),
        ({"capacity_factor": "1"}, "capacity_factor"),
    ],
)
def test_a_router_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        rd.Router(**{"width": 3, "experts": 4, **options})


def test_no_communicator_and_no_mixture() -> None:
    with pytest.raises(InvalidArgumentError, match="mesh"):
        rd.MoE(linear, rd.Router(3, 2), 4)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"no rd\.MoE"):
        balance_loss(linear())
    assert "3 experts on 1 rank" in repr(rd.MoE(linear, rd.Router(3, 3)))


class Pair(torch.nn.Linear):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return super().forward(x), x


class Fewer(torch.nn.Linear):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return super().forward(x).sum(0)


@pytest.mark.parametrize(("expert", "shape", "words"), [
    (Pair, (3, 8), "a row for each, not tuple"),
    (Fewer, (3, 8), "of shape (8,)"),
    (torch.nn.Linear, (3, 5), "tokens of 8 features"),
    (torch.nn.Linear, (), "not one of shape ()"),
])  # fmt: skip
def test_what_experts_can_not_take_or_give_is_named(expert: Any, shape: Any, words: str) -> None:
    def body(comm: rd.Communicator) -> str:
        layer = rd.MoE([expert(8, 8) for _ in range(4)], rd.Router(8, 4), comm)
        with pytest.raises(InvalidArgumentError) as caught:
            layer(torch.ones(shape))
        return str(caught.value)

    assert all(words in told for told in rd.run(body, 2, "threads"))


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_are_in_other_layers_are_told(size: int, first: int) -> None:
    """As layer drop by random numbers of each rank's own has them."""

    def body(comm: rd.Communicator) -> None:
        layers = [rd.MoE(linear, rd.Router(3, 4), comm) for _ in range(2)]
        for _ in range(first):
            for layer in (*layers, *layers[::-1]):
                layer(torch.ones(2, 3))
        at = int(comm.rank > 0)
        with pytest.raises(CollectiveMismatch, match="different layers"):
            layers[at](torch.ones(2, 3))

    rd.run(body, size, "threads")
