"""Pipelines beside pipelines: each stage's replicas train by a strategy, and as one device does."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from tests.parallel.test_pipeline import (  # noqa: E402 - likewise
    EXACT,
    Words,
    _building,
    built,
    words_batch,
    words_loss,
)

from roundelay.errors import InvalidArgumentError, RankFailed  # noqa: E402 - only with torch

STEPS = 3


def alone(model: Any, batch: Any) -> tuple[list[float], dict[str, Any]]:
    whole = copy.deepcopy(model)
    optimizer = torch.optim.Adam(whole.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = words_loss(whole(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(whole.state_dict())


def together(comm: rd.Communicator, model: Any, batch: Any, **options: Any) -> Any:
    """Train on a mesh of two by the rest; return the mean loss of all replicas, and weights."""
    strategy = options.pop("strategy")
    precision = options.pop("precision", "fp32")
    mesh = rd.Mesh(dp=2, pp=comm.size // 2, comm=comm)
    with _building:
        mine = copy.deepcopy(model)
    pipe = rd.Pipeline(mine, comm=mesh["pp"], loss=words_loss, **options)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    pipe, optimizer = rd.prepare(
        pipe, optimizer, comm=mesh["dp"], strategy=strategy, precision=precision
    )
    half = len(batch[0]) // 2
    rows = slice(mesh.place["dp"] * half, (mesh.place["dp"] + 1) * half)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = pipe.step(batch[0][rows], batch[1][rows])
        losses.append(mesh["dp"].all_reduce(loss.view(1)).item() / 2)
        optimizer.step()
    return losses, rd.full_state_dict(pipe), rd.ledger(pipe)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("word", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_every_strategy_on_top_of_every_schedule(strategy: str, word: str, size: int) -> None:
    model, batch = built(Words), words_batch(16)
    expected, weights = alone(model, batch)

    def body(comm: rd.Communicator) -> Any:
        return together(comm, model, batch, strategy=strategy, schedule=word, micro_batches=4)

    results = rd.run(body, size, "threads")
    seen = set()
    for losses, state, _ in results:
        assert losses == pytest.approx(expected, rel=EXACT)
        for name, value in state.items():
            seen.add(name)
            assert float((value - weights[name]).abs().max()) <= 1e-11, name
    assert seen == set(weights)


@pytest.mark.parametrize("word", ["1f1b", "zb-h1"])
def test_gradients_go_to_replicas_once_a_step(word: str) -> None:
    """Two ranks of data parallel exchange as much whether a step has one micro-batch or four."""
    model, batch = built(Words), words_batch(16)

    def sent(micro_batches: int) -> list[int]:
        def body(comm: rd.Communicator) -> int:
            mesh = rd.Mesh(dp=2, pp=2, comm=comm)
            with _building:
                mine = copy.deepcopy(model)
            pipe = rd.Pipeline(mine, comm=mesh["pp"], loss=words_loss, schedule=word,
                               micro_batches=micro_batches)  # fmt: skip
            optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-2)
            pipe, optimizer = rd.prepare(pipe, optimizer, comm=mesh["dp"], strategy="ddp")
            before = mesh["dp"].traffic()
            for _ in range(2):
                optimizer.zero_grad()
                pipe.step(*batch)
                optimizer.step()
            after = mesh["dp"].traffic()
            assert before is not None
            assert after is not None
            return after[0].sent - before[0].sent

        return rd.run(body, 4, "threads")

    assert sent(1) == sent(4)


def test_half_precision() -> None:
    model, batch = built(Words).float(), words_batch(16)
    expected, _ = alone(model, batch)

    def body(comm: rd.Communicator) -> Any:
        return together(comm, model, batch, strategy="ddp", precision="bf16", micro_batches=4)

    for losses, state, _ in rd.run(body, 4, "threads"):
        assert losses == pytest.approx(expected, rel=2e-2)
        assert all(value.dtype == torch.float32 for value in state.values())


def test_scaled_losses_are_refused() -> None:
    model, batch = built(Words).float(), words_batch(16)

    def body(comm: rd.Communicator) -> str:
        with pytest.raises((InvalidArgumentError, RankFailed)) as caught:
            together(comm, model, batch, strategy="ddp", precision="fp16", micro_batches=4)
        return str(caught.value)

    assert all("scale" in said for said in rd.run(body, 4, "threads"))
