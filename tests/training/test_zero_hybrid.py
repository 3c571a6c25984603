"""Groups of ranks that divide a model, each for itself, train as one device does."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, NotFiniteError  # noqa: E402

STAGES = (1, 2, 3)


@pytest.mark.parametrize(("size", "over"), [(2, 2), (4, 2), (6, 3)])
@pytest.mark.parametrize("stage", STAGES)
def test_it_is_one_device(awkward: Any, stage: int, size: int, over: int) -> None:
    """With unused, shared and frozen parameters, weights, micro-batches and clipping."""
    model, batches = awkward.model(), awkward.batches(6)
    alone = copy.deepcopy(model)
    optimizer = awkward.adam(alone.parameters())
    for batch in batches:
        awkward.loss(alone, *batch).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    expected = {key: one.numpy() for key, one in alone.state_dict().items()}

    def be_rank(comm: Any) -> dict[str, Any]:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(
            mine, awkward.adam(mine.parameters()), strategy=rd.Zero(stage, shard_over=over),
            comm=comm,
        )  # fmt: skip
        for tokens, targets in batches:
            shares = [one.tensor_split(comm.size)[comm.rank] for one in (tokens, targets)]
            first, last = ([one[half] for one in shares] for half in (slice(0, 1), slice(1, None)))
            with rd.accumulate(mine):
                rd.backward(awkward.loss(mine, *first), weight=1, model=mine)
            rows = len(last[0])
            rd.backward(awkward.loss(mine, *last) * rows, weight=rows, model=mine)
            own.clip_grad_norm_(0.05)
            own.step()
            own.zero_grad()
        return {key: one.detach().numpy() for key, one in rd.full_state_dict(mine).items()}

    for found in rd.run(be_rank, size, "threads"):
        for key, one in expected.items():
            assert np.abs(found[key] - one).max() <= 1e-12 * np.abs(one).max(), key


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_and_state_are_those_of_any_strategy(
    stacks: Any, tmp_path: Any, stage: int
) -> None:
    model = stacks.make(stacks.Stack, torch.float64)

    def be_rank(comm: Any, strategy: Any, *, load: bool, steps: Any) -> Any:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(mine, stacks.adam(mine), strategy=strategy, comm=comm)
        if load:
            rd.load(tmp_path / "half", mine, own)
        for step in steps:
            x, y = (part.tensor_split(comm.size)[comm.rank]
                    for part in stacks.batch_of(step, torch.float64))  # fmt: skip
            (mine(x) - y).square().mean().backward()
            own.step()
            own.zero_grad()
        if not load:
            rd.save(tmp_path / "half", mine, own)
        state = own.state_dict()["state"]
        arrays = [state[key][name].numpy() for key in sorted(state) for name in sorted(state[key])]
        return [*(one.detach().numpy() for one in rd.full_state_dict(mine).values()), *arrays]

    hybrid = rd.Zero(stage, shard_over=2)
    rd.run(lambda comm: be_rank(comm, hybrid, load=False, steps=range(2)), 4, "threads")
    go_on: dict[str, Any] = {"load": True, "steps": range(2, 4)}
    found = [
        rd.run(lambda comm, way=way: be_rank(comm, way, **go_on), size, "threads")
        for way, size in ((hybrid, 4), ("zero3", 3), ("ddp", 2))
    ]
    for other in (*found[0][1:], *found[1], *found[2]):
        for one, two in zip(found[0][0], other, strict=True):
            assert np.abs(one - two).max() <= 1e-12


@pytest.mark.parametrize("stage", STAGES)
def test_it_holds_a_part_of_its_group_s_and_sends_what_is_priced(stacks: Any, stage: int) -> None:
    model = stacks.make(stacks.wide)
    numel = sum(one.numel() for one in model.parameters())

    def be_rank(comm: Any) -> Any:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(
            mine, stacks.adam(mine), strategy=rd.Zero(stage, shard_over=2), comm=comm
        )
        for step in range(4):
            own.zero_grad()
            mine(torch.ones(3, 64) * step).square().mean().backward()
            own.step()
        return rd.ledger(mine).entries[comm.rank]

    for line in rd.run(be_rank, 4, "threads"):
        for held in (line.measured, line.predicted):
            assert held.optimizer == pytest.approx(8 * numel / 2, rel=0.02)
            assert held.parameters == pytest.approx(4 * numel / (2 if stage == 3 else 1), rel=0.02)
        assert line.sent == pytest.approx(line.sent_predicted, rel=0.01)


def test_faults_are_told_to_all_groups(stacks: Any) -> None:
    model = stacks.make(stacks.Stack, torch.float64)

    def be_rank(comm: Any) -> bool:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(
            mine, stacks.adam(mine), strategy=rd.Zero(3, shard_over=2), comm=comm
        )

        def stumble(_: Any) -> None:
            raise ZeroDivisionError

        for step in range(3):
            loss = stacks.loss_on(comm, mine, step, torch.float64)
            if step == 1:
                hook = mine.blocks[0].register_forward_hook(lambda _, __, out: out * 1)
                if comm.rank == 3:
                    hook.remove()
                    hook = mine.blocks[0].register_forward_hook(
                        lambda _, __, out: out.register_hook(stumble) and None
                    )
                loss = stacks.loss_on(comm, mine, step, torch.float64)
                hook.remove()
                with pytest.raises(ZeroDivisionError if comm.rank == 3 else CollectiveMismatch):
                    loss.backward()
                own.zero_grad()
                loss = stacks.loss_on(comm, mine, step, torch.float64)
            loss.backward()
            own.step()
            own.zero_grad()
        bad = float("nan") if comm.rank == 2 else 1.0
        with pytest.raises(NotFiniteError, match="rank 2"):
            (stacks.loss_on(comm, mine, 0, torch.float64) * bad).backward()

        def differ() -> None:
            with rd.whole(mine), torch.no_grad():
                mine.first.bias.fill_(comm.rank // 2)  # the same in each group

        with pytest.raises(CollectiveMismatch, match=r"first\.bias"):
            differ()
        return True

    assert all(rd.run(be_rank, 4, "threads", timeout=60))


def test_numbers_of_ranks_that_do_not_divide_are_refused_by_name(stacks: Any) -> None:
    def be_rank(comm: Any) -> str:
        mine = stacks.Stack()
        with pytest.raises(InvalidArgumentError) as error:
            rd.prepare(mine, stacks.adam(mine), strategy=rd.Zero(3, shard_over=2), comm=comm)
        return str(error.value)

    assert all("shard_over=2" in told for told in rd.run(be_rank, 3, "threads"))
    for wrong in (1, 0, 1.5, "2"):
        with pytest.raises(InvalidArgumentError):
            rd.Zero(3, shard_over=wrong)  # type: ignore[arg-type]
