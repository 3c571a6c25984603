"""A transformer's block: what it keeps, as the ledger counts it, and sends is by formula."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import roundelay as rd
from roundelay.planning import ModelShape
from roundelay.planning.activations import KeptHow, kept_by_layer

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402 - only with torch

nn = torch.nn
ROWS, LENGTH, WIDTH, HEADS, WIDE = 2, 24, 32, 8, 4
TOKENS, ITEM = ROWS * LENGTH, 4
PLAN = {
    "begin": "split",
    "*norm_*": "norm",
    "block.attention": "region",
    "block.attention.[qkv]": "column:head_width",
    "block.attention.out": "row:head_width",
    "block.perceptron": "region",
    "block.perceptron.0": "column",
    "block.perceptron.2": "row",
    "end": "gather",
}


class Attention(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.head_width = WIDTH // HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Any) -> Any:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, WIDE * WIDTH), nn.GELU(), nn.Linear(WIDE * WIDTH, WIDTH)
        )

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm_1(x))
        return x + self.perceptron(self.norm_2(x))


class Model(nn.Module):  # type: ignore[misc, name-defined]
    """One block, with places at which the sequence is divided and comes together again."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.block, self.end = nn.Identity(), Block(), nn.Identity()

    def forward(self, x: Any) -> Any:
        return self.end(self.block(self.begin(x)))


def entries(size: int, way: str, *, strategy: str = "ddp", again: bool = False) -> list[Any]:
    """Train a step by some axis; return the lines of the ledger."""

    def body(comm: rd.Communicator) -> Any:
        model: Any = Model()
        axis = {"sp": "tp", "none": "dp"}.get(way, way)
        mesh = rd.Mesh(comm=comm, **{axis: size})
        plan: Any = {"plan": PLAN, "sequence_parallel": way == "sp"} if axis == "tp" else {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = rd.prepare(model, optimizer, mesh=mesh, strategy=strategy, **plan)
        x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
        if way == "cp":
            x = rd.shard_sequence(x, comm, 1)

        def loss() -> Any:
            if way == "cp":
                with rd.context_parallel(comm):
                    return model(x).sum()
            return (checkpoint(model, x, use_reentrant=False) if again else model(x)).sum()

        loss().backward()
        optimizer.step()
        before = rd.ledger(model).entries[comm.rank]
        drawn = torch.get_rng_state()
        found = rd.ledger(model, forward=loss)
        assert torch.equal(torch.get_rng_state(), drawn)
        after = rd.ledger(model).entries[comm.rank]
        # What the pass sent, and the ledger itself, is in no mean of steps.
        assert (before.along, before.activations) == (after.along, None)
        assert after.sent == pytest.approx(before.sent, rel=0.001)
        optimizer.zero_grad()  # and training goes on
        loss().backward()
        optimizer.step()
        assert "activations" in str(found)
        return found.entries

    found: list[Any] = rd.run(body, size, "threads")[0]
    return found


def predicted(size: int, way: str) -> float:
    """Return the bytes by formula: h and t of the pages are WIDTH and TOKENS."""
    row = TOKENS * WIDTH
    norms = 2 * (row + 2 * TOKENS)  # inputs, means and deviations of two norms
    inputs = 2 * row  # of attention and perceptron: what the norms made
    inner = 4 * row + TOKENS * HEADS  # queries, keys, values, output; log-sum-exp
    inner += 2 * WIDE * row  # before and after the activation
    if way == "cp":
        return ITEM * (norms + inputs + inner) / size
    if way == "sp":
        return ITEM * (norms / size + inputs + inner / size)
    return ITEM * (norms + inputs + inner / (size if way == "tp" else 1))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("way", ["none", "tp", "sp", "cp"])
def test_measured_is_predicted(way: str, size: int) -> None:
    for entry in entries(size, way):
        assert entry.activations == predicted(size, way)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("way", ["none", "tp", "sp", "cp"])
def test_the_planner_says_the_same(way: str, size: int) -> None:
    model = ModelShape(1, WIDTH, HEADS, 0, (), (), ())
    cut: dict[str, Any] = {
        "tp": size if way in ("tp", "sp") else 1,
        "cp": size if way == "cp" else 1,
    }
    kept = KeptHow(itemsize=ITEM, sequence_parallel=way == "sp", **cut)
    assert kept_by_layer(model, ROWS, LENGTH, kept) == predicted(size, way)
    again = KeptHow(itemsize=ITEM, recompute="full")
    assert kept_by_layer(model, ROWS, LENGTH, again) == ITEM * TOKENS * WIDTH


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", ["tp", "sp"])
def test_calls_of_a_layer(way: str, size: int) -> None:
    """Four sums of activations; with shards of the sequence four gathers and four scatters."""
    whole = ITEM * TOKENS * WIDTH

    def body(comm: rd.Communicator) -> None:
        model, mesh = Model(), rd.Mesh(tp=size, comm=comm)
        rd.apply_plan(model, PLAN, mesh, sequence_parallel=way == "sp")
        calls: list[tuple[str, int]] = []
        for name in ("all_reduce", "all_gather", "reduce_scatter"):

            def call(x: Any, *args: Any, name: str = name, run: Any = None, **options: Any) -> Any:
                result = run(x, *args, **options)
                calls.append((name, (result if name == "all_gather" else x).nbytes))
                return result

            tp: Any = mesh["tp"]
            setattr(tp, name, partial(call, run=getattr(tp, name)))
        model(torch.ones(ROWS, LENGTH, WIDTH, requires_grad=True)).sum().backward()
        large = sorted(each for each in calls if each[1] == whole)
        if way == "tp":
            assert calls == [("all_reduce", whole)] * 4
        else:  # and a gather at the end of the divided part, and one of gradients at its begin
            assert large == [("all_gather", whole)] * 6 + [("reduce_scatter", whole)] * 4
            # Weight and bias of two norms, each pair at once, and biases of two `row` layers.
            small = sorted(nbytes for name, nbytes in calls if nbytes != whole)
            assert small == [ITEM * WIDTH] * 2 + [2 * ITEM * WIDTH] * 2

    rd.run(body, size, "threads")


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "ps"])
def test_every_strategy_keeps_the_same(strategy: str) -> None:
    for entry in entries(2, "none", strategy=strategy):
        assert entry.activations == predicted(2, "none")


def test_what_is_computed_again_is_not_kept() -> None:
    for entry in entries(2, "none", again=True):
        assert entry.activations == ITEM * TOKENS * WIDTH  # the input of what is checkpointed


def test_what_is_no_function_is_refused() -> None:
    model = nn.Linear(2, 2)
    model, _ = rd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=rd.init())
    with pytest.raises(rd.RoundelayError, match="lambda: loss_of"):
        rd.ledger(model, forward=torch.ones(1))
