"""Groups made of groups: who is in them, in which order, used at the same time, given back."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import numpy as np
import pytest

from roundelay.errors import InvalidArgumentError, NoRoomError


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_split_by_color_ordered_by_key(size: int, ranks: Any) -> None:
    def work(comm: Any) -> None:
        for modulus in (1, 2, 3):
            color = None if comm.rank == 4 else comm.rank % modulus
            sub = comm.split(color, key=-comm.rank)
            if color is None:
                assert sub is None
                continue
            members = [r for r in range(comm.size) if r % modulus == color and r != 4][::-1]
            assert sub.size == len(members)
            assert sub.all_gather(np.array([comm.rank]))[:, 0].tolist() == members
            assert members[sub.rank] == comm.rank

    ranks(size, work)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_group_that_follows_has_the_timeout_of_the_other(size: int, ranks: Any) -> None:
    def work(comm: Any) -> None:
        first, alone, closed = (comm.group(range(comm.size)) for _ in range(3))
        second = first.split(0)
        for group, other in ((first, comm), (second, first), (closed, comm), (comm, comm)):
            group.follow_timeout(other)
        closed.close()
        before = alone.timeout
        for limit in (7.0, 0.5, 86.0):
            comm.timeout = limit
            assert (first.timeout, second.timeout, alone.timeout) == (limit, limit, before)
            comm.labelled(3).timeout = limit + 1
            assert (first.timeout, second.timeout, alone.timeout) == (limit + 1, limit + 1, before)
        second.timeout = 9.0  # which holds until the other's is set again
        assert (comm.timeout, first.timeout, second.timeout) == (87.0, 87.0, 9.0)
        comm.timeout = 60.0

    ranks(size, work)


def test_group_takes_ranks_in_any_order(ranks: Any) -> None:
    def work(comm: Any) -> None:
        sub = comm.group([3, 0, 2])
        assert (sub is None) == (comm.rank == 1)
        if sub is not None:
            assert sub.all_gather(np.array([comm.rank]))[:, 0].tolist() == [3, 0, 2]
            assert sub.broadcast(np.array([comm.rank])) == 3

    ranks(4, work)


def test_groups_of_groups_work_at_the_same_time(ranks: Any) -> None:
    def work(comm: Any) -> None:
        half = comm.split(comm.rank // 4)
        pair = half.split(half.rank // 2)
        swapped = comm.split(comm.rank % 2)
        for turn in range(20):
            handles = [
                group.start.all_reduce(np.full(10_000, comm.rank + turn))
                for group in (comm, half, pair, swapped)
            ]
            due = [
                sum(r + turn for r in members)
                for members in (
                    range(8),
                    [r for r in range(8) if r // 4 == comm.rank // 4],
                    [r for r in range(8) if r // 2 == comm.rank // 2],
                    [r for r in range(8) if r % 2 == comm.rank % 2],
                )
            ]
            assert [int(handle.wait()[7]) for handle in handles] == due

    ranks(8, work)


def test_a_closed_communicator_says_so(threads: Any) -> None:
    def work(comm: Any) -> None:
        sub = comm.split(0)
        sub.close()
        sub.close()
        calls: list[Any] = [sub.barrier, lambda: sub.send(np.ones(1), 0), lambda: sub.split(0)]
        for call in calls:
            with pytest.raises(InvalidArgumentError, match="closed"):
                call()
        assert comm.all_reduce(np.ones(1)) == comm.size

    threads(2, work)


def test_groups_and_arrays_give_their_memory_back(ranks: Any) -> None:
    def work(comm: Any) -> tuple[int, int]:
        def cycle() -> None:
            sub = comm.split(comm.rank % 2)
            arrays = [comm.empty(5_000), sub.empty((3, 7), np.int8)]
            sub.all_reduce(arrays[1])
            comm.all_reduce(arrays[0])
            sub.close()

        for _ in range(5):
            cycle()
        gc.collect()
        comm.barrier()
        before = comm._engine.world.used
        for _ in range(200):
            cycle()
        gc.collect()
        comm.barrier()
        return before, comm._engine.world.used

    for before, after in ranks(3, work):
        # A rank may let go after another has asked for more, so a few blocks more are no leak.
        assert after - before < 8_000_000
        assert after < 60_000_000


def test_no_room_is_told_on_every_rank_and_breaks_nothing(ranks: Any) -> None:
    def work(comm: Any) -> None:
        with pytest.raises(NoRoomError, match="no room for"):
            comm.empty(10_000_000)
        with pytest.raises(NoRoomError, match="no room for"):
            comm.split(0)
        assert (comm.all_reduce(comm.empty(10_000)) == 0).all()

    ranks(3, work, arena=1_000_000)


def test_arena_and_private_buffers_mix(ranks: Any) -> None:
    def work(comm: Any) -> None:
        for numel in (1, 10_000, 300_001):
            for mine in range(1 << comm.size):
                x = comm.empty(numel, np.float32)
                if not mine >> comm.rank & 1:
                    x = np.empty(numel, np.float32)
                x[:] = np.arange(numel) % 9 + comm.rank
                assert comm.all_reduce(x) is x
                due = np.arange(numel) % 9 * comm.size + sum(range(comm.size))
                assert (x == due).all()

    ranks(3, work)


def test_arena_arrays_are_separate_zeroed_and_outlive_what_made_them(ranks: Any) -> None:
    def work(comm: Any) -> None:
        sub = comm.split(0)
        first, second = sub.empty(1000, np.int64), sub.empty((2, 500), np.int64)
        assert not first.any()
        first[:], second[:] = 1, 2
        comm.barrier()
        del sub
        gc.collect()
        comm.all_reduce(first)
        assert (first == comm.size).all()
        assert (second == 2).all()
        assert comm.empty(0).shape == (0,)
        assert comm.empty((), np.int8).shape == ()

    ranks(3, work)


def test_a_rank_alone_takes_memory_that_all_reach_and_takes_it_again(ranks: Any) -> None:
    def work(comm: Any) -> None:
        end = comm._engine
        odd = end.own_memory(100 + comm.rank)  # nobody else need ask for as much
        assert odd.size == 100 + comm.rank
        x = end.own_memory(80_000).view(np.float64)
        x[:] = comm.rank + 1
        assert (comm.all_reduce(x) == sum(range(1, comm.size + 1))).all()
        where = x.ctypes.data
        del x
        assert end.own_memory(80_000).ctypes.data == where
        assert end.own_memory(0).size == 0
        comm.barrier()
        used = end.world.used
        for _ in range(100):
            end.own_memory(80_000)[:] = 1
        assert end.world.used == used
        comm.barrier()

    ranks(3, work)


def test_large_arena_buffers_are_reduced_in_place_and_others_are_not(threads: Any) -> None:
    """The pushed program reads and writes others' buffers, so a call leaves the slots untouched."""

    def work(comm: Any) -> list[bool]:
        world, marks = comm._engine.world, []
        own = comm._engine.own_memory(400_000).view(np.float64)
        for x in (comm.empty(50_000), own, np.zeros(50_000)):
            x[:] = 3.0
            comm.barrier()
            before = slots(comm)
            comm.barrier()
            comm.all_reduce(x)
            comm.barrier()
            marks.append(slots(comm) == before)
            comm.barrier()
        assert world.trouble is None
        return marks

    assert threads(2, work) == [[True, True, False]] * 2


def slots(comm: Any) -> bytes:
    """Return the group's memory for large messages as it is now; flags lie before it."""
    group = comm._engine.native
    first, length = (type(group).bytes_for(comm.size, each) for each in (0, 256 * 1024))
    fd = comm._engine.world.fd
    with mmap.mmap(fd, group.at + length, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
        return memory[group.at + first : group.at + length]
