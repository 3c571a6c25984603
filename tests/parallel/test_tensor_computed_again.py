"""Checkpointed blocks train as on one device, whatever of the pass around them is still marked."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import InvalidArgumentError

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402 - only with torch

nn, F = torch.nn, torch.nn.functional
ROWS, TOKENS, WIDTH, WORDS, DIM, STEPS = 2, 6, 12, 9, 2, 3
X = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) * 5 % WORDS
PLAN = {"words": "embedding", "*norm?": "norm", "*up": "column:2",
        "*gate": "column:2", "*down": "row:2", "*[qkv]": "column:2", "*out": "row:2",
        "head": "column gather"}  # fmt: skip


class Block(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        for name in ("q", "k", "v", "out", "up", "gate", "down"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def attention(self, x: Any) -> Any:
        h = self.norm1(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(seen.transpose(1, 2).flatten(2))

    def perceptron(self, x: Any) -> Any:
        return x + self.down(self.up(self.norm2(x)).relu())

    def both(self, x: Any) -> Any:
        return self.perceptron(self.attention(x))


#: What is checkpointed in a block, given how: each is the whole block on one device, too.
CHECKPOINTED: dict[str, Any] = {
    "nothing": lambda b, x, **_: b.both(x),
    "the block": lambda b, x, **how: checkpoint(b.both, x, **how),
    "two residuals": lambda b, x, **how: checkpoint(
        lambda y: b.perceptron(b.perceptron(y)), x, **how
    ),
    "one residual": lambda b, x, **how: checkpoint(b.perceptron, b.attention(x), **how),
    "each": lambda b, x, **how: checkpoint(b.perceptron, checkpoint(b.attention, x, **how), **how),
    "no residual": lambda b, x, **how: x
    + checkpoint(lambda y: b.down(b.up(b.norm2(y)).relu()), x, **how),
    "an activation": lambda b, x, **how: x + b.down(
        checkpoint(lambda u: u.tanh() * u.sigmoid(), b.up(b.norm2(x)), **how)
    ),
    "features and tokens": lambda b, x, **how: checkpoint(
        lambda y, u: y + b.down(u.tanh() * b.gate(b.norm1(y))), x, b.up(b.norm2(x)), **how
    ),
    "one in another": lambda b, x, **how: checkpoint(
        lambda y: checkpoint(b.perceptron, b.attention(y), **how), x, **how
    ),
    "twice with one input": lambda b, x, **how: checkpoint(b.attention, x, **how)
    + checkpoint(b.perceptron, x, **how),
}  # fmt: skip


class Model(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, way: Any, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.how = way, how
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(self, tokens: Any) -> Any:
        x = self.words(tokens)
        for block in (self.first, self.second):
            x = self.way(block, x, **self.how)
        return self.head(x)


def trained(model: Any, optimizer: Any) -> list[float]:
    """Take some steps, with a pass without gradients between; return what each loss was."""
    losses = []
    for at in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model((X + at) % WORDS).flatten(0, 1), X.roll(1).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            model(X)
    return losses


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("divided", [False, True], ids=["whole", "sequence parallel"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_what_is_computed_again_is_that_of_one_device(
    name: str,
    reentrant: bool,  # noqa: FBT001
    size: int,
    divided: bool,  # noqa: FBT001
) -> None:
    start = Model(CHECKPOINTED[name], use_reentrant=reentrant)
    alone = copy.deepcopy(start)
    wanted = trained(alone, torch.optim.SGD(alone.parameters(), lr=0.1)), alone.state_dict()

    def body(comm: rd.Communicator) -> tuple[list[float], dict[str, Any]]:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = rd.prepare(
            model, optimizer, mesh=rd.Mesh(tp=size, comm=comm), plan=PLAN,
            sequence_parallel=divided,
        )  # fmt: skip
        return trained(model, optimizer), rd.full_state_dict(model)

    for losses, state in rd.run(body, size, "threads"):
        torch.testing.assert_close(losses, wanted[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state, wanted[1], rtol=1e-12, atol=1e-12)


#: What a block does that is this rank's alone, when it is first computed or in a hook.
WRONG: dict[str, Any] = {
    "mean of tokens": lambda _, x: x - x.mean(1, keepdim=True),
    "softmax of features": lambda b, x: x + b.down(b.up(x).softmax(-1)),
    "norm in a hook": lambda b, x: x + b.down(hooked(b.up(x), lambda g: g / (1 + g.norm()))),
    "number": lambda b, x: x + b.down(b.up(x)) * b.up(x).max().item(),
}


def hooked(x: Any, hook: Any) -> Any:
    if x.requires_grad:
        x.register_hook(hook)
    return x


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_a_block_is_refused_there_too(
    name: str,
    reentrant: bool,  # noqa: FBT001
    size: int,
) -> None:
    def way(block: Any, x: Any, **how: Any) -> Any:
        return checkpoint(lambda y: WRONG[name](block, y), x, **how)

    def body(comm: rd.Communicator) -> None:
        model = Model(way, use_reentrant=reentrant)
        rd.apply_plan(model, PLAN, rd.Mesh(tp=size, comm=comm), sequence_parallel=True)
        with pytest.raises(InvalidArgumentError, match=r"leaves (the sequence divided|features)"):
            model(X).square().mean().backward()

    rd.run(body, size, "threads")
