"""Messages between two ranks, and Python objects among all."""
# mypy: disable-error-code="attr-defined,no-any-return,no-untyped-call,union-attr,operator"

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

SIZES = (2, 3, 4)
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool,
          torch.complex64]  # fmt: skip


def around(numel: int) -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in DTYPES:
        x = torch.full((numel,), rank + 1.0).to(dtype)
        expected = torch.full((numel,), before + 1.0).to(dtype)
        got = torch.zeros(numel).to(dtype)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, got, before), dist.P2POp(dist.isend, x, after)]
        )
        for work in works:
            work.wait()
        same = got.view(torch.uint8) if dtype.itemsize == 1 else got
        other = expected.view(torch.uint8) if dtype.itemsize == 1 else expected
        assert torch.equal(same, other), dtype
    room = torch.zeros(numel, 2)
    sent = dist.isend(torch.full((numel, 2), float(rank))[:, 1], after, tag=3)
    assert dist.recv(room[:, 1], before, tag=3) == before
    sent.wait()
    return bool((room[:, 1] == before).all() and (room[:, 0] == 0).all())


@pytest.mark.parametrize("numel", [0, 1, 1000, 1_000_000])
@pytest.mark.parametrize("size", SIZES)
def test_messages_go_around(worlds: Any, size: int, numel: int) -> None:
    assert all(worlds.of(size)(around, numel))


def from_anybody() -> list[tuple[int, float]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(torch.full((4,), float(rank)), 0, tag=9)
        return []
    found = []
    for _ in range(size - 1):
        x = torch.empty(4)
        source = dist.recv(x, tag=9)
        found.append((source, x[0].item()))
    return sorted(found)


@pytest.mark.parametrize("size", SIZES)
def test_recv_from_any_source_says_whose_it_was(worlds: Any, size: int) -> None:
    found = worlds.of(size)(from_anybody)
    assert found[0] == [(rank, float(rank)) for rank in range(1, size)]


def by_tag() -> list[float]:
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in range(5)]
        for work in works:
            work.wait()
        return []
    if rank > 1:
        return []
    got = [torch.empty(1) for _ in range(5)]
    works = [dist.irecv(got[tag], 0, tag=tag) for tag in reversed(range(5))]
    for work in works:
        work.get_future().wait()
    return [x.item() for x in got]


def test_tags_are_kept_apart(worlds: Any) -> None:
    assert worlds.of(2)(by_tag)[1] == [0.0, 1.0, 2.0, 3.0, 4.0]


def to_itself() -> bool:
    got = torch.empty(3)
    work = dist.irecv(got, dist.get_rank(), tag=1)
    dist.isend(torch.arange(3.0), dist.get_rank(), tag=1).wait()
    work.wait()
    return torch.equal(got, torch.arange(3.0))


def test_a_rank_can_send_to_itself(worlds: Any) -> None:
    assert all(worlds.of(2)(to_itself))


def objects() -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "tensor": torch.arange(rank + 1), "text": "ä" * rank}
    every: list[Any] = [None] * size
    dist.all_gather_object(every, mine)
    assert [one["rank"] for one in every] == list(range(size))
    assert [len(one["tensor"]) for one in every] == list(range(1, size + 1))
    gathered: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(mine["text"], gathered, dst=1)
    assert gathered is None or gathered == ["ä" * r for r in range(size)]
    shared = [mine, rank] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(shared, src=size - 1)
    assert shared[1] == size - 1
    out: list[Any] = [None]
    dist.scatter_object_list(out, [[r] * r for r in range(size)] if rank == 0 else None, src=0)
    assert out[0] == [rank] * rank
    if rank == 0:
        dist.send_object_list(["hello", 1.5], dst=1)
    if rank == 1:
        got: list[Any] = [None, None]
        assert dist.recv_object_list(got, src=0) == 0
        assert got == ["hello", 1.5]
    return True


@pytest.mark.parametrize("size", SIZES)
def test_objects(worlds: Any, size: int) -> None:
    assert all(worlds.of(size)(objects))
