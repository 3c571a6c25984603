"""Smaller groups, meshes, timeouts, barriers, and what a group says of itself."""
# ruff: noqa: FBT001 - ranks are sent their arguments by position
# mypy: disable-error-code="attr-defined,no-any-return,no-untyped-call,union-attr,operator"

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def subgroups() -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for ranks in ([0, 1], [size - 1, 0], list(range(size))):
        group = dist.new_group(ranks)
        if rank in ranks:
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=group)
            assert x.item() == sum(ranks)
            y = torch.tensor([float(rank)])
            dist.broadcast(y, src=ranks[-1], group=group)
            found.append(y.item())
            assert dist.get_world_size(group) == len(ranks)
            assert dist.get_group_rank(group, rank) == sorted(ranks).index(rank)
            dist.barrier(group)
            dist.destroy_process_group(group)
    mine, every = dist.new_subgroups(2)
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mine)
    assert x.item() == sum(range(rank // 2 * 2, rank // 2 * 2 + 2))
    assert len(every) == size // 2
    return found


def test_subgroups(worlds: Any) -> None:
    found = worlds.of(4)(subgroups)
    assert found == [[1.0, 0.0, 3.0], [1.0, 3.0], [3.0], [0.0, 3.0]]


def meshes() -> bool:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mesh.get_group("rows"))
    assert x.item() == rank % 2 * 2 + 2
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mesh["columns"].get_group())
    assert x.item() == rank // 2 * 4 + 1
    flat = mesh._flatten("all")
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=flat.get_group())
    return x.item() == 6.0


def test_device_mesh(worlds: Any) -> None:
    assert all(worlds.of(4)(meshes))


def split() -> list[float]:
    group: Any = dist.group.WORLD
    rank = dist.get_rank()
    made = group.split_group([0, 2], group_name="evens")
    if rank % 2:
        assert made is None
        return []
    x = torch.tensor([float(rank)])
    made.allreduce([x]).wait()
    assert made.group_name == "evens"
    made.shutdown()
    return [made.rank(), x.item()]


def test_split_group(worlds: Any) -> None:
    assert worlds.of(4)(split) == [[0, 2.0], [], [1, 2.0], []]


def told() -> dict[str, Any]:
    group: Any = dist.group.WORLD
    return {
        "backend": dist.get_backend(),
        "config": dist.get_backend_config(),
        "devices": [str(device) for device in group._device_types],
        "name": group.group_name,
        "description": group.group_desc,
        "found": dist.distributed_c10d._resolve_process_group(group.group_name) is group,
        "ranks": dist.get_process_group_ranks(group),
    }


def test_a_group_says_what_it_is(worlds: Any) -> None:
    for found in worlds.of(2)(told):
        assert found == {
            "backend": "roundelay", "config": "cpu:roundelay", "devices": ["cpu"], "name": "0",
            "description": "default_pg", "found": True, "ranks": [0, 1],
        }  # fmt: skip


def timeouts() -> list[float]:
    group: Any = dist.group.WORLD
    other: Any = dist.new_group(timeout=timedelta(seconds=7))
    before = group.comm.timeout
    group.set_timeout(timedelta(seconds=33))
    after = group.comm.timeout
    group.set_timeout(timedelta(seconds=before))
    return [before, after, other.comm.timeout]


def test_timeouts_are_those_that_were_passed(worlds: Any) -> None:
    assert worlds.of(2)(timeouts) == [[60.0, 33.0, 7.0]] * 2


def late(seconds: float) -> float:
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    began = time.monotonic()
    if dist.get_rank() == 0:
        time.sleep(seconds)
        return 0.0
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        assert "0.5 s" in str(error), error
        assert "new_group" in str(error)
        assert "test_groups.py" in str(error)
    else:
        raise AssertionError
    return time.monotonic() - began


def test_a_timeout_of_new_group_is_kept_and_breaks_that_group_only(worlds: Any) -> None:
    world = worlds.fresh(2)
    found = world(late, 2.5)
    assert 0.4 < found[1] < 2.4
    assert all(world(many_barriers))
    world.close()


def many_barriers() -> bool:
    for _ in range(20):
        dist.barrier()
    return dist.barrier(async_op=True).wait()


def short_barrier() -> str:
    group = dist.new_group()
    if dist.get_rank() == 1:
        time.sleep(1.5)
        return ""
    try:
        dist.barrier(group, timeout=timedelta(seconds=0.3))
    except RuntimeError as error:
        return str(error)
    return "passed"


def test_a_barrier_has_a_timeout_of_its_own(worlds: Any) -> None:
    world = worlds.fresh(2)
    assert "waited 0.3 s for rank 1" in world(short_barrier)[0]
    world.close()


def monitored(missing: list[int], everybody: bool) -> str:
    dist.monitored_barrier()
    text = ""
    if dist.get_rank() not in missing:
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=everybody)
        except RuntimeError as error:
            text = str(error)
    else:
        time.sleep(1.0)
    dist.barrier()
    dist.monitored_barrier()  # the group is none the worse for it
    return text


@pytest.mark.parametrize("everybody", [True, False])
def test_monitored_barrier_names_who_is_missing(worlds: Any, everybody: bool) -> None:
    found = worlds.of(4)(monitored, [1, 3], everybody)
    who = "Ranks 1, 3" if everybody else "Rank 1"
    assert found[0] == f"{who} failed to pass monitoredBarrier in 500 ms."
    assert found[1] == found[3] == ""
    assert found[2].startswith("Rank 2 successfully reached monitoredBarrier")
    assert f"{who} failed to pass" in found[2]


def without_rank_0() -> str:
    if dist.get_rank() == 0:
        time.sleep(1.5)
        return ""
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.3))
    except RuntimeError as error:
        return str(error)
    return "passed"


def test_monitored_barrier_without_rank_0(worlds: Any) -> None:
    assert "Rank 0 did not answer in 300 ms" in worlds.of(2)(without_rank_0)[1]


def of_gloo() -> str:
    group = dist.new_group(backend="gloo")
    dist.monitored_barrier(group)
    return dist.get_backend(group)


def test_monitored_barrier_of_gloo_is_torchs_own(worlds: Any) -> None:
    assert worlds.of(2)(of_gloo) == ["gloo"] * 2


def again_and_again() -> int:
    made = 0
    for _ in range(3):  # the same name in the same store
        group: Any = dist.group.WORLD
        sub = group.split_group(list(range(dist.get_world_size())), group_name="same")
        x = torch.ones(1)
        sub.allreduce([x]).wait()
        dist.barrier()
        sub.shutdown()
        dist.barrier()
        made += int(x.item())
    return made


def test_a_name_can_be_used_again(worlds: Any) -> None:
    assert worlds.of(2)(again_and_again) == [6, 6]


#: What each rank passes to `new_group`, and who comes last.
LISTS = [
    ([[0, 1], [0, 2], [0, 2]], None),
    ([[0, 1], [0, 2], [0, 2]], 2),
    ([[0, 1], [0, 1], [0, 2]], None),
    ([[0, 1], [0, 1], [0, 2]], 0),
    ([[0, 1], [0, 1], [0, 2]], 2),  # when the others have met
    ([[0, 1], [0, 1], [0, 1, 2]], None),
    ([[0, 1], [0, 1], [0, 1, 2]], 2),
    ([[0, 1, 2], [0, 1], [0, 1]], None),
    ([[0, 1, 2], [1, 2], [1, 2]], 0),
    ([[0], [0, 1], [2]], 1),
    ([[0], [1], [2]], None),
    ([[0, 1], [0, 1], [2, 3], [2, 3]], None),
    ([[0, 1], [0, 1], [2, 3], [2, 3]], 3),
    ([[0, 1, 2, 3], [0, 1, 2], [0, 1, 2], [3]], None),
    ([[0, 2], [0, 1], [0, 2], [0, 1, 3]], None),
]


def with_lists(lists: list[list[int]], late: int | None) -> tuple[str, str]:
    """Say how a group of this rank's list fared, and what its error said."""
    rank = dist.get_rank()
    dist.barrier()
    if rank == late:
        time.sleep(1.0)
    told = "is not in it", ""
    try:
        group = dist.new_group(lists[rank])
    except RuntimeError as error:
        told = type(error).__name__, str(error)
    else:
        if rank in lists[rank]:
            x = torch.tensor([10.0**rank])
            dist.all_reduce(x, group=group)
            right = x.item() == sum(10.0**other for other in lists[rank])
            told = ("right" if right else f"wrong: {x.item()}"), ""
    dist.barrier()  # the group of all is none the worse for it
    return told


@pytest.mark.parametrize(("lists", "late"), LISTS)
def test_ranks_that_mean_different_groups_are_told(
    worlds: Any, lists: list[list[int]], late: int | None
) -> None:
    for rank, (how, text) in enumerate(worlds.of(len(lists))(with_lists, lists, late)):
        mine = lists[rank]
        if rank not in mine:
            assert how == "is not in it"
        elif mine == [rank]:
            assert how == "right"
        elif not all(lists[other] == mine for other in mine):
            assert how == "CollectiveMismatch", (rank, how, text)
        else:
            assert how in {"right", "CollectiveMismatch"}, (rank, how, text)
        if text:
            assert f"rank {rank}: {mine}" in text
            others = [r for r in range(len(lists)) if lists[r] != mine]
            assert any(f"rank {other}: {lists[other]}" in text for other in others)
            assert "use_local_synchronization=True" in text


def split_apart() -> str:
    group: Any = dist.group.WORLD
    try:
        group.split_group([0, 1] if dist.get_rank() == 0 else [1, 0], group_name="apart")
    except RuntimeError as error:
        return f"{type(error).__name__} {error}"
    return "passed"


def test_a_split_in_another_order_is_told(worlds: Any) -> None:
    for found in worlds.of(2)(split_apart):
        assert found.startswith("CollectiveMismatch")
        assert "rank 0: [0, 1]" in found
        assert "rank 1: [1, 0]" in found


def one_list_after_the_other() -> list[float]:
    found = []
    for _ in range(2):
        for ranks in ([0], [1, 2], [0, 2], [0, 1, 2]):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                x = torch.tensor([10.0 ** dist.get_rank()])
                dist.all_reduce(x, group=group)
                found.append(x.item())
                dist.destroy_process_group(group)
    mine = [dist.get_rank()] if dist.get_rank() else [0]
    for _ in range(2):  # by a name that is made of the list
        group = dist.new_group(mine, use_local_synchronization=True)
        dist.destroy_process_group(group)
    return found


def test_groups_may_be_of_any_lists_that_all_ranks_name(worlds: Any) -> None:
    due = [[1.0, 101.0, 111.0] * 2, [110.0, 111.0] * 2, [110.0, 101.0, 111.0] * 2]
    assert worlds.of(3)(one_list_after_the_other) == due
