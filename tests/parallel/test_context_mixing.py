"""Inside `rd.context_parallel`, what mixes tokens is refused; what works on single ones is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import InvalidArgumentError

torch = pytest.importorskip("torch")

nn: Any = torch.nn
F = nn.functional
WIDTH, HEADS, LENGTH = 12, 2, 5  # 5 tokens on each of two ranks

Layer = Callable[[Any], Any]


def heads(x: Any) -> Any:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def by_hand(weigh: Layer) -> Layer:
    return lambda x: (weigh(heads(x) @ heads(x).mT) @ heads(x)).transpose(1, 2).flatten(2)


def mixture(x: Any) -> Any:
    """Call a layer of this rank's own: two threads do not call one at once."""
    return rd.MoE(lambda: nn.Linear(WIDTH, WIDTH), rd.Router(WIDTH, 4))(x)


MIXES: dict[str, Layer] = {
    "convolution": lambda x: nn.Conv1d(WIDTH, WIDTH, 3, padding=1)(x.mT).mT,
    "lstm": lambda x: nn.LSTM(WIDTH, WIDTH, batch_first=True)(x)[0],
    "gru": lambda x: nn.GRU(WIDTH, WIDTH)(x)[0],
    "batch norm": lambda x: nn.BatchNorm1d(WIDTH)(x.mT).mT,
    "mean": lambda x: x + x.mean(1, keepdim=True),
    "max": lambda x: x + torch.max(x, dim=1, keepdim=True).values,
    "cumsum": lambda x: x + x.cumsum(1),
    "roll": lambda x: x + x.roll(1, 1),
    "flip": lambda x: x + x.flip(1),
    "shift": lambda x: x + torch.cat([0 * x[:, :1], x[:, :-1]], 1),
    "last": lambda x: x + x[:, -1:],
    "later": lambda x: x + F.pad(x[..., 1:, :], (0, 0, 0, 1)),
    "softmax": by_hand(lambda a: a.softmax(-1)),
    "softmax of columns": by_hand(lambda a: a.softmax(-2)),
    "log softmax": by_hand(lambda a: F.log_softmax(a, -1).exp()),
    "special": by_hand(lambda a: torch.special.softmax(a, -1)),
    "exponentials": by_hand(lambda a: a.exp() / a.exp().sum(-1, keepdim=True)),
    "sigmoid": by_hand(torch.sigmoid),
    "linear": lambda x: (heads(x) @ (heads(x).mT @ heads(x))).transpose(1, 2).flatten(2),
    "einsum": lambda x: torch.einsum("btd,bte->bde", x, x).mean() + x,
}
SINGLE: dict[str, Layer] = {
    "norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "norm by hand": lambda x: x - x.mean(-1, keepdim=True),
    "heads": lambda x: x + heads(x).sum(1).repeat(1, 1, HEADS),
    "gates": lambda x: x[..., :6].repeat(1, 1, 2) * x[:, :, 6:].sigmoid().repeat(1, 1, 2),
    "pointwise": lambda x: nn.Conv1d(WIDTH, WIDTH, 1)(x.mT).mT,
    "softmax of features": lambda x: x.softmax(-1),
    "best": lambda x: x * x.topk(2, -1).values.sum(-1, keepdim=True),
    "product": lambda x: x @ torch.ones(WIDTH, WIDTH),
    "einsum": lambda x: torch.einsum("btd,de->bte", x, torch.ones(WIDTH, WIDTH)),
    "mixture": mixture,
    "loss": lambda x: x + x.square().mean(),
}


def attended(x: Any) -> Any:
    q = heads(x)
    return x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


def called(layer: Layer, *, first: bool) -> list[str]:
    """Return what each rank is told if a layer is called before attention, or after it."""

    def body(comm: rd.Communicator) -> str:
        x = torch.ones(1, LENGTH, WIDTH)
        try:
            with rd.context_parallel(comm):
                attended(layer(x)) if first else layer(attended(x))
        except InvalidArgumentError as error:
            return str(error)
        return ""

    told: list[str] = rd.run(body, 2, "threads")
    return told


@pytest.mark.parametrize("first", [False, True], ids=["behind", "before"])
@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_tokens_is_refused(name: str, first: bool) -> None:  # noqa: FBT001
    assert all("this rank" in told for told in called(MIXES[name], first=first))


@pytest.mark.parametrize("first", [False, True], ids=["behind", "before"])
@pytest.mark.parametrize("name", SINGLE)
def test_single_tokens_are_not(name: str, first: bool) -> None:  # noqa: FBT001
    assert called(SINGLE[name], first=first) == ["", ""]
