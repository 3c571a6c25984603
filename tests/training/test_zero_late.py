"""ZeRO-3 waits for no gradient that does not come, and counts the one that comes after all."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.planning.rows import TURNS  # noqa: E402
from roundelay.training.strategies.zero._grad_buckets import GradBuckets  # noqa: E402

nn = torch.nn

WIDTH, DEPTH, STEPS = 6, 8, 3
NAMES = ("zero1", "zero2", "zero3")


class Block(nn.Module):  # type: ignore[misc, name-defined]
    """Has a weight that is used now and then, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seldom = nn.Parameter(torch.full((WIDTH,), 0.9))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Any, use: Any) -> Any:
        y = torch.tanh(self.linear(x))
        return y * self.seldom if use else y


class Stack(nn.Module):  # type: ignore[misc, name-defined]
    """Says after every block, in backward, what `look` sees."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.look: Any = None

    def forward(self, x: Any, uses: Any) -> Any:
        x = x * self.gain
        for number, block in enumerate(self.blocks):
            x = block(x, uses(number))
            if self.look is not None:
                x.register_hook(self.look)
        return x


def uses(step: int, rank: int) -> Any:
    """Say which blocks use their weight: others in every step, and on every rank."""
    return lambda block: (7 * step + 3 * rank + 5 * block + step * block // 3) % 3 == 0


def loss_of(model: Any, step: int, rank: int, size: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(12, WIDTH, generator=generator, dtype=torch.float64)
    return model(rows.tensor_split(size)[rank], uses(step, rank)).square().mean()


def plain(model: Any, step: int, rank: int, size: int) -> Any:
    return loss_of(model, step, rank, size)


def twice(model: Any, step: int, rank: int, size: int) -> Any:
    """Call the model twice before backward."""
    return loss_of(model, step, rank, size) + loss_of(model, step + 20, rank, size)


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone(model: Any, loss: Any, size: int, passes: int) -> dict[str, Any]:
    mine = copy.deepcopy(model)
    optimizer = sgd(mine)
    for step in range(STEPS):
        for one in range(passes):
            sum(loss(mine, step + 10 * one, rank, size) / size for rank in range(size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(mine.state_dict())


def together(comm: Any, model: Any, loss: Any, name: Any, passes: int) -> dict[str, Any]:
    mine = copy.deepcopy(model)
    mine, own = rd.prepare(mine, sgd(mine), strategy=name, comm=comm)
    for step in range(STEPS):
        for one in range(passes):
            with rd.accumulate(mine) if one < passes - 1 else nullcontext():
                loss(mine, step + 10 * one, comm.rank, comm.size).backward()
        own.step()
        own.zero_grad()
    return {key: one.clone() for key, one in rd.full_state_dict(mine).items()}


def assert_alike(model: Any, loss: Any, size: int, passes: int, name: Any) -> None:
    expected = alone(model, loss, size, passes)
    for found in rd.run(together, size, "threads", (model, loss, name, passes)):
        for key, one in expected.items():
            assert (found[key] - one).abs().max() <= 1e-12, (loss.__name__, name, key)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("passes", [1, 2])
def test_ranks_may_use_different_weights_in_every_step(stacks: Any, size: int, passes: int) -> None:
    """More blocks than there are rows on their way: a rank that waited would never end."""
    model = stacks.make(Stack, torch.float64)
    for name in NAMES:
        assert_alike(model, plain, size, passes, name)
    assert_alike(model, twice, size, passes, "zero3")
    assert_alike(model, plain, size, passes, rd.Zero(reshard_after_forward=False))
    if size == 4:
        assert_alike(model, plain, size, passes, rd.Zero(shard_over=2))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("passes", [1, 2])
def test_what_comes_late_counts(
    stacks: Any, monkeypatch: pytest.MonkeyPatch, size: int, passes: int
) -> None:
    """Here all rows go as soon as the first unit was left."""
    own, late = GradBuckets.leave, []

    def leave(self: Any, _: Any) -> None:
        own(self, [bucket.flat for bucket in self.all])

    def add_late(self: Any, add: Any = GradBuckets.add_late) -> None:
        late.append(self.late)
        add(self)

    monkeypatch.setattr(GradBuckets, "leave", leave)
    monkeypatch.setattr(GradBuckets, "add_late", add_late)
    model = stacks.make(Stack, torch.float64)
    assert_alike(model, plain, size, passes, "zero3")
    assert late.count(True) == size * STEPS * passes


@pytest.mark.parametrize("size", [2, 3])
def test_unused_weights_hold_no_rows(stacks: Any, size: int) -> None:
    """From the first step on gradients lie in the memory that the ledger counts."""
    model = stacks.make(Stack, torch.float64)

    def be_rank(comm: Any) -> list[tuple[int, bool]]:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(mine, sgd(mine), strategy="zero3", comm=comm)
        gradients, seen = own.run.state.buckets, []

        def look(_: Any) -> None:
            held = [bucket.buffer for bucket in gradients.all if bucket.buffer is not None]
            counted = {one.data_ptr() for one in gradients.transient}
            seen.append((len(held), all(one.data_ptr() in counted for one in held)))

        mine.look = look
        for step in range(STEPS):
            loss_of(mine, step, comm.rank, size).backward()
            own.step()
            own.zero_grad()
        return seen

    for seen in rd.run(be_rank, size, "threads"):
        assert len(seen) == STEPS * DEPTH
        assert all(counted for _, counted in seen)
        assert max(held for held, _ in seen) < TURNS
