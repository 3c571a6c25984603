"""Sequences that are divided, or put together, in the midst of a model that is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

nn, F = torch.nn, torch.nn.functional
ROWS, WORDS, WIDTH = 4, 9, 6
Divide = Callable[[Any], Any]


class Classifier(nn.Module):  # type: ignore[misc, name-defined]
    """Tokens one by one, then all of a sequence together."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Any, shard: Divide, unshard: Divide, *, inside: bool) -> Any:
        x = shard(self.words(tokens)) if inside else self.words(shard(tokens))
        return self.head(unshard(torch.tanh(self.inner(x))).mean(1))


@pytest.mark.parametrize("axes", [{"cp": 2}, {"cp": 3}, {"dp": 2, "cp": 2}], ids=str)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "ps"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("inside", [False, True], ids=["", "inside"])
def test_what_it_learns_is_what_one_device_learns(
    inside: bool,  # noqa: FBT001
    layout: str,
    strategy: str,
    axes: dict[str, int],
) -> None:
    torch.manual_seed(0)
    start = Classifier().double()
    length = 12
    tokens, classes = torch.randint(0, WORDS, (ROWS, length)), torch.randint(0, 3, (ROWS,))
    alone = copy.deepcopy(start)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for _ in range(3):
        F.cross_entropy(alone(tokens, lambda x: x, lambda x: x, inside=inside), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
    right = alone.state_dict()

    def body(comm: rd.Communicator) -> None:
        mesh = rd.Mesh(comm=comm, **axes)
        cp, dp = mesh["cp"], mesh["dp"] if "dp" in axes else None
        mine = copy.deepcopy(start)
        mine, own = rd.prepare(mine, torch.optim.SGD(mine.parameters(), lr=0.5), mesh=mesh,
                               strategy=strategy)  # fmt: skip
        rows = slice(dp.rank, None, dp.size) if dp else slice(None)
        for _ in range(3):
            said = mine(
                tokens[rows],
                lambda x: rd.shard_sequence(x, cp, layout=layout),
                lambda x: rd.unshard_sequence(x, cp, layout=layout),
                inside=inside,
            )
            F.cross_entropy(said, classes[rows]).backward()
            own.step()
            own.zero_grad()
        for name, found in rd.full_state_dict(mine).items():
            torch.testing.assert_close(found, right[name], rtol=1e-11, atol=1e-13)

    size = 1
    for each in axes.values():
        size *= each
    rd.run(body, size, "threads")
