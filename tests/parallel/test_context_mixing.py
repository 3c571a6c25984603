"""Inside `rd.context_parallel`, what mixes tokens is refused; what works on single ones is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch, InvalidArgumentError

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
    "flat": lambda x: (
        x.view(-1, WIDTH).tanh().view(x.shape)
        * x.reshape(*x.shape[:2], 2, -1).sum(2).repeat(1, 1, 2)
    ),
    "turned": lambda x: torch.cat((-x[..., 6:], x[..., :6]), -1) * x.cos(),
    "losses": lambda x: x * (F.mse_loss(x, x).item() + by_class(x, "mean").item() > -1),
    "losses of tokens": lambda x: x * by_class(x, "none").view(x.shape[:2])[..., None],
    "by its length": lambda x: torch.cat(x[:, : x.shape[1]].split(x.size(1), 1), 1),
    "local": lambda x: x + rd.local(x)[:, torch.arange(LENGTH)],
    "hook": lambda x: hooked(x, lambda g: g - g.mean(-1, keepdim=True)),
}
#: What is seen once attention has said which tensors have tokens.
MIXES_BEHIND: dict[str, Layer] = {
    "mean of all": lambda x: x - x.mean(),
    "mean of all by hand": lambda x: x * x.square().sum().sqrt(),
    "norm of all": lambda x: x / x.norm(),
    "largest": lambda x: x / x.max(),
    "number": lambda x: x * x.sum().item(),
    "branch": lambda x: x if (x > 0).any() else -x,
    "numpy": lambda x: x * float(x.detach().numpy().mean()),
    "loss that scales": lambda x: x * F.mse_loss(x, 0 * x),
    "two dims": lambda x: x - x.sum((0, 1)),
    "rows and tokens in one dim": lambda x: x - x.view(-1, WIDTH).mean(0),
    "permuted": lambda x: x - x.permute(2, 0, 1).mean(2).T[:, None],
    "shift by padding": lambda x: x + F.pad(x, (0, 0, 1, 0))[..., :-1, :],
    "pool": lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT,
    "normalize": lambda x: F.normalize(x, dim=1),
    "norm over tokens": lambda x: F.layer_norm(x, x.shape[1:]),
    "group norm": lambda x: F.group_norm(x.mT, 2).mT,
    "unbind": lambda x: torch.stack(x.unbind(1)[::-1], 1),
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "gather": lambda x: x + x.gather(1, torch.zeros(x.shape, dtype=torch.long)),
    "fourier": lambda x: torch.fft.fft(x, dim=1).real,
    "triangle": lambda x: x.tril(),
    "quantile": lambda x: x - x.quantile(0.5, 1, keepdim=True),
    "matrix": lambda x: (x.mT @ torch.ones(LENGTH, LENGTH)).mT,
    "similarity": lambda x: x * F.cosine_similarity(x, x, dim=1)[:, None],
    "some": lambda x: x + x[:, torch.arange(LENGTH)].mean(1, keepdim=True),
    "written": lambda x: x.clone().index_fill_(1, torch.tensor([0]), 0.0),
    "first set": lambda x: x.clone().__setitem__((slice(None), slice(LENGTH)), 0.0),
    "first changed": lambda x: x.clone().narrow(1, 0, LENGTH).zero_(),
    "by number": lambda x: torch.cat([y * at for at, y in enumerate(x.split(LENGTH, 1))], 1),
    "residual": lambda x: (x + torch.ones(1, LENGTH, WIDTH)).std() * x,
}


TABLE, TURNS = torch.ones(4 * LENGTH, WIDTH), torch.ones(WIDTH)
#: Places that begin at 0 on every rank; on one device they would go on.
PLACES: dict[str, Layer] = {
    "learnt": lambda x: x + TABLE[torch.arange(x.shape[1])],
    "embedded": lambda x: x + F.embedding(torch.arange(0, x.shape[1]), TABLE),
    "rotary": lambda x: x * (torch.arange(x.shape[1], dtype=x.dtype)[:, None] * TURNS).cos(),
    "named": lambda x: x * torch.arange(start=0, end=x.shape[1])[:, None],
    "first rows": lambda x: x + TABLE[: x.shape[1]],
    "first rows of rows": lambda x: x + TABLE[None, : x.size(1), :],
    "first rows by dots": lambda x: x + TABLE[None][..., 0 : x.size(1), :],
    "narrow": lambda x: x + TABLE.narrow(0, 0, x.size(1)),
    "by a mask": lambda x: x + TABLE[torch.ones(x.shape[:2], dtype=torch.long).cumsum(-1) - 1],
    "written": lambda x: x.clone().add_(TABLE[: x.size(1)]),
}
PLACES_OF_ALL: dict[str, Layer] = {
    "not used": lambda x: x + 0 * len(torch.arange(x.shape[1])) + TABLE[: x.shape[1]].new_ones(()),
    "local": lambda x: x + TABLE[rd.local(torch.arange(x.shape[1])) + LENGTH],
    "later": lambda x: x + TABLE[torch.arange(LENGTH, 2 * LENGTH)] + TABLE[LENGTH : 2 * LENGTH],
    "others": lambda x: x + TABLE[torch.arange(LENGTH + 1)].sum(0),
    "features": lambda x: x[..., : WIDTH // 2].repeat(1, 1, 2) * torch.arange(WIDTH),
}


def by_class(x: Any, reduction: str) -> Any:
    classes = torch.zeros(LENGTH, dtype=torch.long)
    return F.cross_entropy(x.view(-1, WIDTH), classes, reduction=reduction)


def hooked(x: Any, hook: Layer) -> Any:
    x = x * torch.ones(WIDTH, requires_grad=True)
    x.register_hook(hook)
    return x


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


@pytest.mark.parametrize("name", MIXES_BEHIND)
def test_what_attention_gives_is_followed(name: str) -> None:
    assert all("this rank" in told for told in called(MIXES_BEHIND[name], first=False))


def test_a_sum_over_tokens_may_be_a_term_of_the_loss() -> None:
    def body(comm: rd.Communicator) -> tuple[float, bool]:
        x = torch.ones(1, LENGTH, WIDTH, requires_grad=True)
        with rd.context_parallel(comm):
            out = attended(x)
            loss = F.mse_loss(out, torch.zeros_like(out)) + 0.1 * out.square().mean()
            loss.backward()
        return loss.item(), bool((x.grad != 0).all())

    (one, learnt), (other, _) = rd.run(body, 2, "threads")
    assert one == other > 0
    assert learnt


@pytest.mark.parametrize("name", ["norm", "mean"])
def test_a_hook_sees_gradients_of_tokens(name: str) -> None:
    """Of all tokens a norm is another one, also behind the block, where hooks are called."""

    def body(comm: rd.Communicator) -> str:
        x = torch.ones(1, LENGTH, WIDTH, requires_grad=True)
        with rd.context_parallel(comm):
            out = hooked(attended(x), lambda g: g - getattr(g, name)())
        try:
            out.sum().backward()
        except InvalidArgumentError as error:
            return str(error)
        return ""

    assert all("this rank" in told for told in rd.run(body, 2, "threads"))


@pytest.mark.parametrize("first", [False, True], ids=["behind", "before"])
@pytest.mark.parametrize("name", SINGLE)
def test_single_tokens_are_not(name: str, first: bool) -> None:  # noqa: FBT001
    assert called(SINGLE[name], first=first) == ["", ""]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("first", [False, True], ids=["behind", "before"])
@pytest.mark.parametrize("name", PLACES)
def test_places_from_0_on_are_refused(name: str, first: bool, layout: str) -> None:  # noqa: FBT001
    """Before attention on all ranks; behind it on those that have them wrong."""

    def body(comm: rd.Communicator) -> str:
        x, layer = torch.ones(1, LENGTH + 1, WIDTH), PLACES[name]
        try:
            with rd.context_parallel(comm, layout=layout):
                attended(layer(x)) if first else layer(attended(x))
        except (InvalidArgumentError, CollectiveMismatch) as error:
            return str(error)
        return ""

    told = rd.run(body, 2, "threads")
    assert "rd.sequence_positions" in told[1]
    assert ("rd.sequence_positions" in told[0]) == (first or layout == "zigzag")


@pytest.mark.parametrize("first", [False, True], ids=["behind", "before"])
@pytest.mark.parametrize("name", PLACES_OF_ALL)
def test_other_places_are_not(name: str, first: bool) -> None:  # noqa: FBT001
    assert called(PLACES_OF_ALL[name], first=first) == ["", ""]
