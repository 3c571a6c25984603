"""Masks that a model's code draws: the same where ranks have the same activations, else others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

nn, F = torch.nn, torch.nn.functional
STEPS = 3
Drawn = list[tuple[bool, list[bool]]]


class Block(nn.Module):  # type: ignore[misc, name-defined]
    """Draws a mask of 32 inside of its cut layers, and one between them; and notes both."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 64), nn.Linear(64, 8)
        self.drawn = drawn

    def mask(self, *, inside: bool, count: int = 32) -> Any:
        mask = F.dropout(torch.ones(count), 0.5, training=self.training)
        self.drawn.append((inside, (mask > 0).tolist()))
        return mask

    def forward(self, x: Any) -> Any:
        y = self.up(self.norm(x)) * self.mask(inside=True).sum()
        return x + self.down(y) * self.mask(inside=False, count=8) / 100


class Model(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.drawn: Drawn = []
        self.blocks = nn.ModuleList([Block(self.drawn), Block(self.drawn)])
        self.head, self.again = nn.Linear(8, 4), again

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = (
                torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                if self.again
                else block(x)
            )
        return self.head(x)


PLAN = {"*.norm": "norm", "*.up": "column", "*.down": "row", "head": "column gather"}


def train(comm: rd.Communicator, strategy: str, *, again: bool, sequence: bool) -> Drawn:
    torch.manual_seed(comm.rank)  # which a plan makes alike
    model: Any = Model(again=again)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = rd.prepare(
        model, optimizer, mesh=rd.Mesh(tp=2, comm=comm), strategy=strategy,
        plan=PLAN | ({"blocks.0": "split"} if sequence else {}), sequence_parallel=sequence,
    )  # fmt: skip
    for _ in range(STEPS):
        model(torch.ones(2, 4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found: Drawn = model.drawn
    return found


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_masks(strategy: str, again: bool, sequence: bool) -> None:  # noqa: FBT001
    body = partial(train, strategy=strategy, again=again, sequence=sequence)
    first, second = rd.run(body, 2, "shared_memory")
    assert len(first) == len(second) == 4 * STEPS * (1 + again)
    for (inside, mine), (_, others) in zip(first, second, strict=True):
        assert (mine == others) == (not inside and not sequence)
    for drawn in (first, second):
        inside = [str(mask) for within, mask in drawn if within]
        assert len({*inside}) == 2 * STEPS  # a block that is computed again has its mask again
        if again:
            assert sorted(inside) == sorted([*{*inside}] * 2)


def test_evaluation_draws_nothing() -> None:
    """Also where numbers go on from there: they are those of a program without a plan."""

    def body(comm: rd.Communicator) -> float:
        model = Model(again=False).eval()
        rd.apply_plan(model, PLAN, rd.Mesh(tp=2, comm=comm))
        torch.manual_seed(7)
        model(torch.ones(2, 4, 8)).sum().backward()
        return float(torch.rand(1))

    torch.manual_seed(7)
    assert rd.run(body, 2, "shared_memory") == [float(torch.rand(1))] * 2
