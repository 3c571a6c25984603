"""`rd.whole` under every strategy: parameters are read and written as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import roundelay as rd  # noqa: E402 - only with torch
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, RankFailed  # noqa: E402
from roundelay.training.prepare import known_strategies  # noqa: E402

nn = torch.nn

SYNCHRONOUS = [name for name, one in known_strategies().items() if one.synchronous]


@pytest.fixture
def make(stacks: Any) -> Any:
    """Return what prepares a stack with a frozen part and a shared one; without ranks, as it is."""
    start = stacks.make(stacks.Stack, torch.float64)
    start.blocks[0].down.requires_grad_(requires_grad=False)
    start.blocks[2].up.weight = start.blocks[1].up.weight

    def prepared(comm: Any, strategy: Any) -> tuple[Any, Any]:
        model = copy.deepcopy(start)
        if comm is None:
            return model, stacks.adam(model)
        return rd.prepare(model, stacks.adam(model), strategy=strategy, comm=comm)

    return prepared


def edit(model: Any, ema: Any) -> None:
    """Write in all the ways there are, and read."""
    with torch.no_grad():
        model.blocks[0].down.weight.mul_(1.25)  # frozen
        model.blocks[1].up.weight.data.clamp_(-0.3, 0.3)  # shared
        model.last.bias.data = model.last.bias.detach() + 0.5
        nn.init.ones_(model.blocks[2].norm.weight)
        for mine, one in zip(ema.parameters(), model.parameters(), strict=True):
            mine.lerp_(one.to(mine.dtype), 0.5)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_what_is_read_and_written_is_that_of_one_device(
    stacks: Any, make: Any, name: str, size: int
) -> None:
    def train(comm: Any) -> list[Any]:
        model, optimizer = make(comm, name)
        ema, _ = make(None, name)
        seen = []
        for step in range(3):
            alone = stacks.Alone() if comm is None else comm
            stacks.loss_on(alone, model, step, torch.float64).backward()
            optimizer.step()
            optimizer.zero_grad()
            if comm is None:
                edit(model, ema)
            else:
                with rd.whole(model) as same:
                    assert same is model
                    edit(model, ema)
                    with rd.whole(model.blocks):  # once more, of a part
                        seen.append(model(stacks.batch_of(9, torch.float64)[0]).detach())
            if comm is None:
                seen.append(model(stacks.batch_of(9, torch.float64)[0]).detach())
        whole = model.state_dict() if comm is None else rd.full_state_dict(model)
        return [*seen, *whole.values(), *ema.state_dict().values()]

    expected = train(None)
    for found in rd.run(lambda comm: [one.numpy() for one in train(comm)], size, "threads"):
        for one, other in zip(found, expected, strict=True):
            assert abs(one - other.detach().numpy()).max() <= 1e-12 * abs(other).max().item()


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_master_weights_get_what_is_written_and_keep_the_rest(stacks: Any, name: str) -> None:
    model = stacks.make(stacks.Stack)  # in float32
    other = {key: one + 1e-4 for key, one in model.blocks[0].state_dict().items()}

    def be_rank(comm: Any) -> bool:
        mine = copy.deepcopy(model)
        mine, own = rd.prepare(mine, stacks.adam(mine), strategy=name, comm=comm, precision="bf16")
        with rd.whole(mine), torch.no_grad():
            mine.load_state_dict(
                {**mine.state_dict(), **{f"blocks.0.{key}": one for key, one in other.items()}}
            )
            mine.last.bias[0] = 0.5
        whole = rd.full_state_dict(mine)
        for key, one in other.items():  # unrounded
            assert torch.equal(whole[f"blocks.0.{key}"], one), key
        assert whole["last.bias"][0] == 0.5
        mine(torch.zeros(1, 4)).sum().backward()
        own.step()
        return True

    assert all(rd.run(be_rank, 2, "threads"))


def refused(kind: Any, block: Any) -> str:
    with pytest.raises(kind) as error:
        block()
    return str(error.value)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_ranks_that_write_different_values_are_told_which(make: Any, name: str) -> None:
    def be_rank(comm: Any) -> bool:
        model, _ = make(comm, name)
        before = {key: one.clone() for key, one in rd.full_state_dict(model).items()}

        def differ() -> None:
            with rd.whole(model), torch.no_grad():
                model.first.bias.add_(1)
                model.blocks[1].norm.bias[-1] = comm.rank == 2

        told = refused(CollectiveMismatch, differ)
        assert "blocks.1.norm.bias" in told
        assert "rank 2 others than rank 0" in told
        if name == "zero3":  # nothing of it stays
            assert all(torch.equal(one, before[key])
                       for key, one in rd.full_state_dict(model).items())  # fmt: skip
        return True

    assert all(rd.run(be_rank, 3, "threads"))


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_an_exception_inside_leaves_what_was_written_and_nothing_gathered(
    stacks: Any, make: Any, name: str
) -> None:
    def be_rank(comm: Any) -> bool:
        model, own = make(comm, name)
        with pytest.raises(ZeroDivisionError), rd.whole(model), torch.no_grad():
            model.first.bias.fill_(2.0)
            raise ZeroDivisionError
        assert (rd.full_state_dict(model)["first.bias"] == 2).all()
        if name == "zero3":
            assert own.run.state.partition.scheduler.in_flight == 0
            with pytest.raises(InvalidArgumentError, match=r"rd\.whole"):
                copy.deepcopy(model.first.bias)
        stacks.loss_on(comm, model, 0, torch.float64).backward()
        own.step()
        return True

    assert all(rd.run(be_rank, 2, "threads"))


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_what_has_no_place_inside_is_refused_by_name(stacks: Any, make: Any, name: str) -> None:
    def be_rank(comm: Any) -> list[str]:
        model, own = make(comm, name)
        told = []
        loss = stacks.loss_on(comm, model, 0, torch.float64)
        with rd.whole(model.blocks[1]):
            told.append(refused(InvalidArgumentError, loss.backward))
            told.append(refused(InvalidArgumentError, own.step))
            told.append(refused(InvalidArgumentError, lambda: rd.unprepare(model)))

        class Looks(torch.autograd.Function):  # type: ignore[misc, name-defined]
            @staticmethod
            def forward(_: Any, x: Any) -> Any:
                return x * 1

            @staticmethod
            def backward(_: Any, grad: Any) -> Any:
                with rd.whole(model):
                    return grad

        own.zero_grad()
        told.append(refused(InvalidArgumentError, lambda: Looks.apply(loss).backward()))
        told.append(refused(InvalidArgumentError, lambda: rd.whole(nn.Linear(1, 1))))
        stacks.loss_on(comm, model, 0, torch.float64).backward()
        own.step()
        return told

    for told in rd.run(be_rank, 2, "threads"):
        assert all("whole" in one for one in told), told


def test_under_zero3_it_is_for_outside_of_forward_and_knows_what_backward_needs(
    stacks: Any, make: Any
) -> None:
    def be_rank(comm: Any) -> bool:
        model, own = make(comm, "zero3")

        def look(*_: Any) -> None:
            with rd.whole(model.first):
                pass

        hook = model.blocks[1].register_forward_hook(look)
        told = refused(InvalidArgumentError, lambda: stacks.loss_on(comm, model, 0, torch.float64))
        assert "forward" in told
        hook.remove()
        first, second = (stacks.loss_on(comm, model, at, torch.float64) for at in (0, 1))
        with rd.whole(model):
            first += model.blocks[0].up.weight.detach().sum()  # reading changes nothing
        first.backward()
        own.zero_grad()
        with rd.whole(model.blocks), torch.no_grad():
            model.blocks[0].norm.bias[0] += 1  # of which one rank alone has a part
        assert "changed since" in refused(InvalidArgumentError, second.backward)
        return True

    assert all(rd.run(be_rank, 2, "threads"))


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3"])
def test_some_ranks_alone_are_told(stacks: Any, make: Any, name: str) -> None:
    def be_rank(comm: Any) -> None:
        model, _ = make(comm, name)
        if comm.rank == 0:
            with rd.whole(model):
                pass
        stacks.loss_on(comm, model, 0, torch.float64).backward()

    with pytest.raises((CollectiveMismatch, RankFailed)) as error:
        rd.run(be_rank, 2, "threads", timeout=20)
    assert "different calls" in str(error.value)
    assert "test_whole.py" in str(error.value)


def test_a_copy_made_inside_is_a_model_of_its_own(stacks: Any, make: Any) -> None:
    def be_rank(comm: Any) -> bool:
        model, _ = make(comm, "zero3")
        x = stacks.batch_of(0, torch.float64)[0]
        expected = model(x).detach()
        with rd.whole(model):
            average = torch.optim.swa_utils.AveragedModel(model)
            state = {key: one.clone() for key, one in model.state_dict().items()}
        if comm.rank == 0:  # by itself
            assert torch.equal(average(x).detach(), expected)
            average.module.load_state_dict(state)
        comm.barrier()
        return True

    assert all(rd.run(be_rank, 2, "threads"))


def test_servers_get_what_workers_write(stacks: Any, make: Any) -> None:
    def be_rank(comm: Any) -> bool:
        model, own = make(comm, "ps-async")
        stacks.loss_on(comm, model, 0, torch.float64).backward()
        own.step()
        with rd.whole(model), torch.no_grad():
            seen = model.last.weight.detach().clone()
            model.first.bias.fill_(2.0)
        whole = rd.full_state_dict(model)
        assert torch.equal(whole["last.weight"], seen)
        assert (whole["first.bias"] == 2).all()
        return True

    assert all(rd.run(be_rank, 3, "threads"))
