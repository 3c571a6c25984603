"""What lies between layers on shards of the sequence is right, or refused on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.parallel.conftest import outcome_of

import roundelay as rd
from roundelay.errors import InvalidArgumentError

torch = pytest.importorskip("torch")


nn, F = torch.nn, torch.nn.functional
ROWS, TOKENS, WIDTH, WORDS = 2, 6, 6, 11
PLAN = {"words": "embedding", "*.norm": "norm", "*.up": "column", "*.down": "row",
        "norm": "norm", "head": "column gather"}  # fmt: skip

#: Of each token by itself, or of its features: these are taken.
RIGHT: dict[str, Any] = {
    "nothing": lambda x: x,
    "pointwise": lambda x: torch.where(x > 0, x.sin(), x * 2) + x.detach(),
    "features": lambda x: F.normalize(x.softmax(-1), dim=-1) - x.mean(-1, keepdim=True),
    "rows": lambda x: x - x.mean(0, keepdim=True),
    "product": lambda x: x @ torch.ones(WIDTH, WIDTH).double().triu(),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "heads": lambda x: x.unflatten(-1, (2, -1)).softmax(-2).flatten(-2),
}
#: Along the tokens of all ranks, of which each has some.
REFUSED: dict[str, Any] = {
    "mean": lambda x: x + x.mean(1, keepdim=True),
    "mean of all": lambda x: x - x.mean(),
    "largest": lambda x: x + x.amax(1, keepdim=True),
    "softmax": lambda x: x.softmax(1),
    "softmax of a transpose": lambda x: x.mT.softmax(-1).mT,
    "cumsum": lambda x: x.cumsum(1),
    "roll": lambda x: x + x.roll(1, 1),
    "flip": lambda x: x.flip(1),
    "first": lambda x: x + x[:, :1],
    "last": lambda x: x + x[:, -1:],
    "shifted": lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention by hand": lambda x: (x @ x.mT) @ x,
    "einsum": lambda x: torch.einsum("btd,bsd->bts", x, x) @ x,
    "pool": lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT,
    "positions": lambda x: x + torch.arange(x.shape[1]).double()[:, None],
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "rows and tokens": lambda x: x.flatten(0, 1).softmax(0).view_as(x),
    "norm over tokens": lambda x: F.layer_norm(x, x.shape[1:]),
    "a number of all": lambda x: x * x.detach().abs().max().item(),
}


class Block(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, between: Any, after: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.between, self.after = between, after
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = Block(), Block()
        self.double()

    def forward(self, tokens: Any) -> Any:
        x = self.between(self.first(self.words(tokens)))
        return self.head(self.after(self.norm(self.second(x))))


def outcome(model: Any) -> list[Any]:
    tokens = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) * 5 % WORDS
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(0).flatten())
    return outcome_of(model, loss, loss)


def verdicts(function: Any, place: str, size: int) -> set[str]:
    """Say what ranks make of it: 'refused', 'right' or 'wrong'."""
    start = Model(**{"between": RIGHT["nothing"], "after": RIGHT["nothing"], place: function})
    wanted = outcome(copy.deepcopy(start))

    def body(comm: rd.Communicator) -> str:
        model = copy.deepcopy(start)
        rd.apply_plan(model, PLAN, rd.Mesh(tp=size, comm=comm), sequence_parallel=True)
        try:
            found = outcome(model)
        except InvalidArgumentError as error:
            return "refused" if "leaves the sequence divided" in str(error) else str(error)
        off = max((a - b).abs().max() for a, b in zip(found, wanted, strict=True))
        return "right" if off <= 1e-12 * max(b.abs().max() for b in wanted) else f"wrong by {off}"

    return {*rd.run(body, size, "threads")}


@pytest.mark.parametrize("place", ["between", "after"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [*RIGHT, *REFUSED])
def test_functions_of_tokens_are_right_and_those_along_them_refused(
    name: str, size: int, place: str
) -> None:
    function = RIGHT.get(name) or REFUSED[name]
    assert verdicts(function, place, size) == {"right" if name in RIGHT else "refused"}
