"""Calls in the background: they complete by themselves, in order, and can be asked."""
# ruff: noqa: FBT001 - ranks are sent their arguments by position
# mypy: disable-error-code="attr-defined,no-any-return,no-untyped-call,union-attr,operator"

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

SIZES = (2, 3, 4)


def callbacks_run_though_nobody_waits() -> bool:
    ran = threading.Event()
    seen: list[torch.Tensor] = []

    def then(future: torch.futures.Future[Any]) -> int:
        seen.extend(future.value())
        ran.set()
        return 5

    x = torch.ones(1000)
    chained = dist.all_reduce(x, async_op=True).get_future().then(then)
    assert ran.wait(30)
    assert chained.wait() == 5
    return bool((seen[0] == dist.get_world_size()).all())


@pytest.mark.parametrize("size", SIZES)
def test_callbacks_run_though_nobody_waits(worlds: Any, size: int) -> None:
    assert all(worlds.of(size)(callbacks_run_though_nobody_waits))


def callbacks_may_wait_for_other_works() -> list[float]:
    def then(future: torch.futures.Future[Any]) -> torch.Tensor:
        (x,) = future.value()
        work = dist.all_reduce(x, async_op=True)
        return work.get_future().wait()[0]

    futures = [dist.all_reduce(torch.ones(3), async_op=True).get_future() for _ in range(5)]
    # One after the other: what a callback starts must be in the same order on every rank.
    return [future.then(then).wait()[0].item() for future in futures]


def test_callbacks_may_wait_for_other_works(worlds: Any) -> None:
    assert worlds.of(2)(callbacks_may_wait_for_other_works) == [[4.0] * 5] * 2


def many_at_once_keep_their_order() -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    works, expected = [], []
    for turn in range(60):
        x = torch.full((1 + 37 * turn,), float(rank + turn))
        kind = turn % 4
        if kind == 0:
            works.append((dist.all_reduce(x, async_op=True), x))
            expected.append(sum(range(size)) + size * turn)
        elif kind == 1:
            works.append((dist.broadcast(x, turn % size, async_op=True), x))
            expected.append(turn % size + turn)
        elif kind == 2:  # takes two rounds, so that what follows must wait for its turn
            out = torch.empty(size)
            given = torch.full((size,), float(turn))
            work = dist.all_to_all_single(out, given, [1] * size, [1] * size, async_op=True)
            works.append((work, out))
            expected.append(turn)
        else:  # at once, after all that were started
            dist.all_reduce(x, dist.ReduceOp.MAX)
            works.append((None, x))
            expected.append(size - 1 + turn)
    for (work, x), value in zip(reversed(works), reversed(expected), strict=True):
        assert work is None or work.wait()
        assert (x == value).all(), (x[0], value)
    return True


@pytest.mark.parametrize("size", SIZES)
def test_many_at_once_keep_their_order(worlds: Any, size: int) -> None:
    assert all(worlds.of(size)(many_at_once_keep_their_order))


def some_wait_and_some_do_not() -> bool:
    """Whether a rank waits is its own business."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(size):
        mine = rank == turn
        x = torch.full((5,), float(rank))
        work = dist.all_reduce(x, async_op=mine)
        outs = [torch.empty(3) for _ in range(size)]
        second = dist.all_gather(outs, torch.full((3,), float(rank)), async_op=mine)
        out = torch.empty(2)
        rows = [torch.full((2,), float(r)) for r in range(size)] if rank == 0 else None
        third = dist.scatter(out, rows, src=0, async_op=not mine)
        given, got = torch.arange(float(size)), torch.empty(size)
        fourth = dist.all_to_all_single(got, given, [1] * size, [1] * size, async_op=mine)
        for one in (work, second, third, fourth):
            assert one is None or one.wait()
        assert (x == sum(range(size))).all()
        assert [o[0].item() for o in outs] == list(range(size))
        assert (out == rank).all()
        assert (got == rank).all()
    return True


@pytest.mark.parametrize("size", SIZES)
def test_ranks_need_not_agree_on_async_op(worlds: Any, size: int) -> None:
    assert all(worlds.of(size)(some_wait_and_some_do_not))


def asked() -> bool:
    rank = dist.get_rank()
    x = torch.ones(4)
    if rank == 0:
        time.sleep(0.3)
    work = dist.all_reduce(x, async_op=True)
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"not done after the 0\.02 s"):
            work.wait(timedelta(seconds=0.02))
        assert not work.is_completed()
        assert not work.is_success()
    limit = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < limit:
        time.sleep(0.001)
    assert work.is_success()
    assert work.exception() is None
    assert work.wait()
    assert work.wait(timedelta(seconds=1))
    assert torch.equal(work.result()[0], x)
    assert torch.equal(work.get_future().value()[0], x)
    assert (x == dist.get_world_size()).all()
    return True


def test_a_work_can_be_asked(worlds: Any) -> None:
    assert all(worlds.of(2)(asked))


def polled_without_wait() -> bool:
    """Results of tensors that are not contiguous are there once it says so."""
    room = torch.zeros(5, 2)
    room[:, 0] = 1.0
    work = dist.all_reduce(room[:, 0], async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    return bool((room[:, 0] == dist.get_world_size()).all() and (room[:, 1] == 0).all())


def test_polling_is_enough(worlds: Any) -> None:
    assert all(worlds.of(2)(polled_without_wait))


def coalesced(async_ops: bool) -> bool:
    size = dist.get_world_size()
    ones = [torch.full((n,), 1.0) for n in (1, 10, 100)]
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        for one in ones:
            dist.all_reduce(one)
    manager.wait()
    assert all((one == size).all() for one in ones)
    outs, ins = [torch.empty(size * n) for n in (1, 5)], [torch.ones(n) for n in (1, 5)]
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        for out, given in zip(outs, ins, strict=True):
            dist.all_gather_single(out, given)
    manager.wait()
    assert all((out == 1).all() for out in outs)
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        for out, given in zip(outs, ins, strict=True):
            dist.reduce_scatter_single(given, out)
    manager.wait()
    assert all((given == size).all() for given in ins)
    x, y = torch.ones(3), torch.ones(4)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=async_ops) as manager:
        dist.broadcast(x, 0)
        dist.reduce(y, 0)
    manager.wait()
    assert (y == (size if dist.get_rank() == 0 else 1)).all()
    assert all(work.is_completed() and work.is_success() for work in manager.works)
    return len(manager.works) == int(async_ops)


@pytest.mark.parametrize("async_ops", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_coalescing(worlds: Any, size: int, async_ops: bool) -> None:
    assert all(worlds.of(size)(coalesced, async_ops))


def profiled() -> list[str]:
    x = torch.ones(2, 3)
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.barrier()
        dist.all_gather([torch.empty(2, 3) for _ in range(dist.get_world_size())], x)
    events = [event for event in profile.events() if event.name.startswith("roundelay:")]
    assert events[0].input_shapes == [[2, 3]]
    return [event.name for event in events]


def test_calls_are_shown_in_the_profile(worlds: Any) -> None:
    names = ["all_reduce", "all_reduce", "barrier", "all_gather"]
    assert worlds.of(2)(profiled) == [[f"roundelay:{name}" for name in names]] * 2


def other_forms() -> bool:
    """The signatures that C++ backends have in Python beside those that dist uses."""
    group: Any = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((2,), float(rank + 1))
    group.allreduce(x.clone()).wait()
    group.allreduce([x.clone()], dist.ReduceOp.MAX).wait()
    y = x.clone()
    group.allreduce(y, op=dist.ReduceOp.MAX).wait()
    assert (y == size).all()
    y = x.clone()
    group.broadcast(y, root=1).wait()
    assert (y == 2).all()
    y = x.clone()
    group.reduce(y, 0, dist.ReduceOp.SUM).wait()
    outs = [torch.empty(2) for _ in range(size)]
    group.allgather(outs, x).wait()
    assert [out[0].item() for out in outs] == list(range(1, size + 1))
    group.gather(outs if rank == 0 else [], x, root=0).wait()
    y = torch.empty(2)
    group.scatter(y, outs if rank == 0 else [], root=0).wait()
    assert torch.equal(y, x)
    group.reduce_scatter(y, outs).wait()
    assert (y == size * (rank + 1)).all()
    group._allgather_base(torch.empty(size, 2), x).wait()
    group._reduce_scatter_base(y, torch.ones(size, 2)).wait()
    group.alltoall_base(torch.empty(size), torch.ones(size), [], []).wait()
    group.barrier().wait()
    group.barrier(timeout=timedelta(seconds=10)).wait()
    assert group.name() == group._get_backend_name() == "roundelay"
    assert (group.rank(), group.size()) == (rank, size)
    return True


@pytest.mark.parametrize("size", [2, 3])
def test_a_group_can_be_called_directly(worlds: Any, size: int) -> None:
    assert all(worlds.of(size)(other_forms))


def in_place() -> bool:
    """Input and output that share memory, as FSDP passes them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(size * 4)
    mine = whole[4 * rank : 4 * rank + 4]
    mine.fill_(rank + 1)
    dist.all_gather_single(whole, mine)
    assert torch.equal(whole, torch.arange(1.0, size + 1).repeat_interleave(4))
    dist.reduce_scatter_single(mine, whole)
    assert (mine == size * (rank + 1)).all()
    same = torch.arange(float(size))
    dist.all_to_all_single(same, same)
    assert (same == rank).all()
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
def test_input_may_be_a_part_of_the_output(worlds: Any, size: int) -> None:
    assert all(worlds.of(size)(in_place))


def reduction_kinds() -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = torch.full((3,), float(rank + 1), dtype=dtype)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert (x == torch.tensor((size + 1) / 2, dtype=dtype)).all()
        for factor in (0.5, torch.tensor(0.5)):
            half = dist.ReduceOp.PREMUL_SUM(factor)
            x = torch.full((3,), 2.0 * rank, dtype=dtype)
            dist.all_reduce(x, half)
            assert (x == sum(range(size))).all()
            x = torch.full((3,), 2.0 * rank, dtype=dtype)
            dist.reduce(x, 0, half)
            assert (x == (sum(range(size)) if rank == 0 else 2 * rank)).all()
            out, given = torch.empty(1, dtype=dtype), torch.full((size,), 2.0, dtype=dtype)
            dist.reduce_scatter_single(out, given, half)
            assert (out == size).all()
            assert (given == 2).all()
    flags = torch.tensor([True, False, rank == 0])
    for op, expected in (
        (dist.ReduceOp.BAND, [True, False, False]),
        (dist.ReduceOp.BOR, [True, False, True]),
        (dist.ReduceOp.MAX, [True, False, True]),
    ):
        x = flags.clone()
        dist.all_reduce(x, op)
        assert x.tolist() == expected, op
    x = torch.tensor([1 + 2j, -1j]) * (rank + 1)
    dist.all_reduce(x)
    assert torch.equal(x, torch.tensor([1 + 2j, -1j]) * sum(range(1, size + 1)))
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
def test_averages_factors_flags_and_complex_numbers(worlds: Any, size: int) -> None:
    assert all(worlds.of(size)(reduction_kinds))


def uneven() -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    outs = [torch.empty(n) for n in range(size)]
    dist.all_gather(outs, torch.full((rank,), float(rank)))
    assert [out.tolist() for out in outs] == [[float(n)] * n for n in range(size)]
    out = torch.empty(rank)
    dist.reduce_scatter(out, [torch.ones(n) for n in range(size)])
    assert out.tolist() == [float(size)] * rank
    for async_op in (True, False):
        # Rank s sends s + d rows of two to rank d.
        sent = [rank + other for other in range(size)]
        given, got = torch.full((sum(sent), 2), float(rank)), torch.empty(sum(sent), 2)
        work = dist.all_to_all_single(got, given, sent, sent, async_op=async_op)
        assert work is None or work.wait()
        assert got[:, 0].tolist() == [float(o) for o in range(size) for _ in range(rank + o)]
        parts = [torch.full((n,), float(rank)) for n in sent]
        outs = [torch.empty(n) for n in sent]
        work = dist.all_to_all(outs, parts, async_op=async_op)
        assert work is None or work.wait()
        assert [o.tolist() for o in outs] == [[float(o)] * (rank + o) for o in range(size)]
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shares_may_be_uneven(worlds: Any, size: int) -> None:
    assert all(worlds.of(size)(uneven))
