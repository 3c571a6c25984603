"""What goes wrong on some ranks is told to all, and where it can be, training goes on."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, RankFailed  # noqa: E402

nn = torch.nn

RESIDENT = ["ddp", "zero1", "zero2", "ps"]


def stumble(_: Any) -> None:
    raise ZeroDivisionError("on purpose")


class Stumbling(nn.Module):  # type: ignore[misc, name-defined]
    """Blocks whose outputs may raise in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.last = nn.Linear(6, 3)
        self.bad: int | None = None

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for at, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if at == self.bad:
                x.register_hook(stumble)
        return self.last(x)


def trained(stacks: Any, comm: Any, strategy: str, model: Any, fault: Any) -> dict[str, Any]:
    """Train four steps, of which one is lost where there is a fault: its step, place and ranks."""
    mine = copy.deepcopy(model)
    mine, own = rd.prepare(mine, stacks.adam(mine), strategy=strategy, comm=comm)

    def at_once(module: Any, _: Any, out: Any) -> None:  # before any gradient has come
        if module.bad == len(module.blocks):
            out.register_hook(stumble)

    mine.register_forward_hook(at_once)
    for step in range(4):
        if fault is not None and step == fault[0]:
            if strategy == "zero3":
                mine.bad = fault[1] if comm.rank in fault[2] else None
                kind = ZeroDivisionError if comm.rank in fault[2] else CollectiveMismatch
                inside = rd.accumulate(mine) if fault[3] else nullcontext()
                with inside, pytest.raises(kind) as error:
                    stacks.loss_on(comm, mine, step, torch.float64).backward()
                assert kind is ZeroDivisionError or f"on rank {fault[2][0]}" in str(error.value)
                with pytest.raises(InvalidArgumentError, match="zero_grad"):
                    own.step()
                mine.bad = None
                own.zero_grad()
                assert own.run.state.partition.scheduler.in_flight == 0
            continue
        stacks.loss_on(comm, mine, step, torch.float64).backward()
        own.step()
        own.zero_grad()
    return {key: one.detach().numpy() for key, one in rd.full_state_dict(mine).items()}


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("ranks", [[0], [2], [0, 1, 2]])
def test_a_backward_pass_that_raises_under_zero3(stacks: Any, ranks: Any, accumulates: Any) -> None:
    """At a unit or at once, in the first pass and in a later one; the next batch is right."""
    model = stacks.make(Stumbling, torch.float64)

    def be_rank(comm: Any) -> float:
        worst = 0.0
        for step, places in ((0, (1, 3)), (2, (0, 3))):
            expected = trained(stacks, comm, "ddp", model, (step,))
            for place in places:
                found = trained(stacks, comm, "zero3", model, (step, place, ranks, accumulates))
                far = (float(np.abs(one - expected[key]).max()) for key, one in found.items())
                worst = max(worst, *far)
        return worst

    assert max(rd.run(be_rank, 3, "threads", timeout=60)) <= 1e-12


def test_a_backward_pass_that_raises_where_others_need_more_is_told(stacks: Any) -> None:
    model = stacks.make(Stumbling, torch.float64)

    def be_rank(comm: Any) -> None:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(mine, stacks.adam(mine), strategy="zero3", comm=comm)
        x = torch.ones(2, 6, dtype=torch.float64)
        mine.blocks[0](x).sum().backward()
        own.zero_grad()
        for block in mine.blocks:  # of which the pass before has shown nothing
            x = block(x)
        if comm.rank == 0:
            x.register_hook(stumble)
        x.sum().backward()

    with pytest.raises((CollectiveMismatch, RankFailed, ZeroDivisionError)) as error:
        rd.run(be_rank, 2, "threads", timeout=20)
    assert isinstance(error.value, ZeroDivisionError) or "on rank 0" in str(error.value)


# ---- what ranks write differently

WRITES = {
    "in place": lambda p: p.mul_(1.5),
    "a row": lambda p: p[-1].add_(1.0),
    "other memory": lambda p: setattr(p, "data", p.detach() + 1),
    "loaded": lambda p: p.copy_(torch.ones_like(p)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_what_some_ranks_alone_have_written_is_told(
    stacks: Any, strategy: str, write: str, *, late: bool
) -> None:
    """With the gradients that come next: of this step, or if it is late of the one after it."""
    model = stacks.make(stacks.Stack, torch.float64)

    def be_rank(comm: Any) -> str:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(mine, stacks.adam(mine), strategy=strategy, comm=comm)

        def differ() -> None:
            if comm.rank == 1:
                with torch.no_grad():
                    WRITES[write](mine.blocks[1].up.weight)  # type: ignore[no-untyped-call]

        for step in range(2):
            with torch.no_grad():  # all of them alike
                mine.last.bias.mul_(0.5)
            stacks.loss_on(comm, mine, step, torch.float64).backward()
            if step == 1 and late:
                differ()
            own.step()
            own.zero_grad()
        if not late:
            differ()
        with pytest.raises(CollectiveMismatch) as error:
            stacks.loss_on(comm, mine, 2, torch.float64).backward()
        return str(error.value)

    for told in rd.run(be_rank, 3, "threads", timeout=60):
        assert "rank 1" in told
        assert "blocks.1.up.weight" in told


@pytest.mark.parametrize("strategy", RESIDENT)
def test_who_writes_back_what_was_there_may_go_on(stacks: Any, strategy: str) -> None:
    model = stacks.make(stacks.Stack, torch.float64)

    def be_rank(comm: Any) -> bool:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(mine, stacks.adam(mine), strategy=strategy, comm=comm)
        weight = mine.blocks[1].up.weight
        before = weight.detach().clone()
        for values in (before + 1, before.flip(0), before):
            if comm.rank == 1:
                with torch.no_grad():
                    weight.copy_(values)
            loss = stacks.loss_on(comm, mine, 0, torch.float64)
            if values is before:
                loss.backward()
                own.step()
            else:
                with pytest.raises(CollectiveMismatch, match=r"blocks\.1\.up"):
                    loss.backward()
            own.zero_grad()
        return True

    assert all(rd.run(be_rank, 2, "threads", timeout=60))


def test_under_zero3_forward_may_not_write_what_would_be_lost(stacks: Any) -> None:
    class Normed(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4, max_norm=0.5)
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: Any) -> Any:
            return self.blocks[0](self.embed(x))

    model = stacks.make(Normed)

    def be_rank(comm: Any, strategy: str) -> str:
        mine = copy.deepcopy(model)
        mine, _ = rd.prepare(mine, stacks.adam(mine), strategy=strategy, comm=comm)
        rows = torch.tensor([comm.rank, 2 + comm.rank])
        with pytest.raises((InvalidArgumentError, CollectiveMismatch)) as error:
            mine(rows).sum().backward()
        return str(error.value)

    for strategy in ("ddp", "zero2", "zero3"):  # in others every rank writes other rows
        for told in rd.run(be_rank, 2, "threads", (strategy,)):
            assert "embed.weight" in told
            assert ("max_norm" in told) == (strategy == "zero3")


# ---- hooks that are added after prepare


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("strategy", [*RESIDENT, "zero3"])
def test_hooks_added_later_see_the_gradient_and_may_change_it(
    stacks: Any, strategy: str, size: int
) -> None:
    model = stacks.make(stacks.Stack, torch.float64)

    def be_rank(comm: Any, *, early: bool, late: bool) -> dict[str, Any]:
        mine = copy.deepcopy(model)
        seen: list[float] = []

        def change(tensor: Any) -> None:
            seen.append(float(tensor.grad.norm()))
            tensor.grad.mul_(2)

        weight = mine.blocks[1].up.weight
        hooks = [weight.register_post_accumulate_grad_hook(change)] if early else []
        mine, own = rd.prepare(
            mine, torch.optim.SGD(mine.parameters(), lr=0.1), strategy=strategy, comm=comm
        )
        hooks += [weight.register_post_accumulate_grad_hook(change)] if late else []
        for step in range(3):
            if step == 2:
                for hook in hooks:
                    hook.remove()
            stacks.loss_on(comm, mine, step, torch.float64).backward()
            own.step()
            own.zero_grad()
        assert len(seen) == 2 * (early + late)
        return {key: one.detach().numpy() for key, one in rd.full_state_dict(mine).items()}

    early, late = (
        rd.run(lambda comm, way=way: be_rank(comm, early=way, late=not way), size, "threads")
        for way in (True, False)
    )
    stacks.assert_same(early, late)


# ---- parameters without elements


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", [*RESIDENT, "zero3"])
def test_a_parameter_without_elements_is_saved_and_loaded(
    stacks: Any, tmp_path: Any, strategy: str, size: int
) -> None:
    class Hollow(stacks.Stack):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.empty(0, 4))
            self.blocks[1].none = nn.Parameter(torch.empty(3, 0))

        def forward(self, x: Any) -> Any:
            return super().forward(x) + self.none.sum()

    model = stacks.make(Hollow, torch.float64)

    def be_rank(comm: Any) -> bool:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(mine, stacks.adam(mine), strategy=strategy, comm=comm)
        stacks.loss_on(comm, mine, 0, torch.float64).backward()
        own.step()
        own.zero_grad()
        path = tmp_path / strategy
        rd.save(path, mine, own)
        before = {key: one.clone() for key, one in rd.full_state_dict(mine).items()}
        stacks.loss_on(comm, mine, 1, torch.float64).backward()
        own.step()
        rd.load(path, mine, own)
        after = rd.full_state_dict(mine)
        return all(torch.equal(after[key], one) for key, one in before.items())

    assert all(rd.run(be_rank, size, "threads"))
