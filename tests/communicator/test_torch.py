"""Tensors go in and come out as tensors: every dtype, any layout, with autograd told of writes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.communicator.memory import overlap
from roundelay.engines import DeviceArray
from roundelay.errors import InvalidArgumentError

torch = pytest.importorskip("torch", reason="torch is not installed")

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
]


def test_every_dtype_and_layout(ranks: Any) -> None:
    def work(comm: Any) -> None:
        for dtype in DTYPES:
            for numel in (0, 1, 7, 30_000):
                plain = (torch.arange(numel * 2) % 5).to(dtype)
                for x in (plain[:numel].clone(), plain.clone()[::2], plain.clone().view(2, -1).T):
                    due = torch.stack([x.to(torch.complex128)] * comm.size).sum(0)
                    due = (due != 0 if dtype is torch.bool else due).to(dtype)
                    before = x.clone()
                    rows = comm.all_gather(x)
                    assert isinstance(rows, torch.Tensor)
                    assert rows.dtype is dtype
                    assert all(torch.equal(row, before) for row in rows)
                    assert comm.all_reduce(x) is x
                    assert torch.equal(x, due), (dtype, numel)
                    if comm.rank:
                        x.zero_()
                    assert torch.equal(comm.broadcast(x), due)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # casting complex to real drops a zero
            ranks(3, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_swapped_in_place(dtype: Any, ranks: Any) -> None:
    """Also where the two buffers are two views of a tensor, or one is numpy's."""

    def work(comm: Any) -> None:
        other = 1 - comm.rank
        for numel in (2, 1_000_000):
            every = (torch.arange(2 * numel) % 100).to(dtype)
            row = every + comm.rank
            views = [(row, row), (row[:numel], row[numel // 2 : -numel // 2])]
            if dtype is torch.float32:
                views.append((row.numpy(), row))
            for x, into in views:
                row.copy_(every + comm.rank)
                assert comm.sendrecv(x, other, into, other) is into
                assert torch.equal(into, every[: len(into)] + other)

    ranks(2, work)


def test_tensors_of_a_device_overlap_where_those_of_the_host_do() -> None:
    """Their elements are never looked at, so that memory of the host will do for a device's."""
    row = torch.zeros(12)
    views = [row[first::step][:numel]
             for first in (0, 1, 5) for step in (1, 2, 3) for numel in (0, 1, 2, 4)]  # fmt: skip
    views += [row.view(3, 4)[:, :2], row.view(3, 4)[:, 2:], row.view(4, 3).T, torch.zeros(12)]
    for one in views:
        for other in views:
            placed = [DeviceArray(each, np.dtype("float32")) for each in (one, other)]
            due = np.shares_memory(one.numpy(), other.numpy())
            assert overlap(*placed) == due, (one.stride(), other.stride())
        assert not overlap(placed[0], one.numpy())


def test_halves_round_once(ranks: Any) -> None:
    def work(comm: Any) -> None:
        rng = torch.Generator().manual_seed(7)
        every = torch.randn(comm.size, 999, generator=rng).to(torch.bfloat16)
        due = every[0].float()
        for row in every[1:]:
            due = due + row.float()
        assert torch.equal(comm.all_reduce(every[comm.rank].clone()), due.to(torch.bfloat16))
        assert torch.equal(
            comm.all_reduce(every[comm.rank].clone(), "avg"), (due / comm.size).to(torch.bfloat16)
        )

    ranks(4, work)


def test_autograd_sees_what_was_written(threads: Any) -> None:
    def work(comm: Any) -> None:
        leaf = torch.ones(3, requires_grad=True)
        assert comm.all_reduce(leaf) is leaf
        assert leaf.requires_grad
        assert leaf.tolist() == [2.0] * 3
        x = torch.ones(3, requires_grad=True)
        product = (x * 2) ** 2
        before = product._version
        comm.all_reduce(product)
        assert product._version > before
        y = x * 3
        z = (y * y).sum()  # needs y as it was
        comm.broadcast(y, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            if comm.rank == 0:
                z.backward()
            else:
                raise RuntimeError("modified by an inplace operation")  # the root's is not written
        with torch.inference_mode():
            assert comm.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]

    threads(2, work)


def shrunk(tensor: Any, elements: int) -> Any:
    """Return the tensor, with so many elements in its storage: what lies beyond is not its own."""
    tensor.untyped_storage().resize_(elements * tensor.element_size())
    return tensor


def test_a_storage_that_still_holds_the_tensor_may_have_shrunk(threads: Any) -> None:
    def work(comm: Any) -> None:
        assert comm.all_reduce(shrunk(torch.ones(100)[:60], 60)).tolist() == [2.0] * 60
        assert comm.all_reduce(shrunk(torch.ones(100)[:0], 0)).tolist() == []

    threads(2, work)


@pytest.mark.filterwarnings("ignore")  # torch's, of kinds of tensors that may yet change
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(2, device="meta"), "on meta"),
        (lambda: torch.ones(2).to_sparse(), "dense"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch.zeros(2, dtype=torch.float8_e5m2), "float8_e5m2"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.ones(2, 2).to_sparse_csr(), "to_dense"),
        (lambda: torch.ones(2, 2).to_mkldnn(), "to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8), "dequantize"),
        (lambda: torch.ones(1).expand(3), "same place"),
        (lambda: shrunk(torch.ones(100), 0), "storage that holds 0"),
        (lambda: shrunk(torch.ones(100), 60), "storage that holds 60"),
        (lambda: shrunk(torch.ones(100)[50:], 99), "100 elements in a storage that holds 99"),
        (lambda: shrunk(torch.ones(10, 10).T[::3, ::2], 89), "storage that holds 89"),
        (lambda: shrunk(torch.ones(9, dtype=torch.bfloat16), 3), "storage that holds 3"),
    ],
)
def test_what_has_no_plain_memory_is_refused(make: Any, message: str, threads: Any) -> None:
    def work(comm: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=message):
            comm.all_reduce(make())

    threads(1, work)


def test_the_arena_serves_tensors(ranks: Any) -> None:
    def work(comm: Any) -> None:
        x = torch.from_numpy(comm.empty(50_000, np.float32))
        x.fill_(comm.rank + 1)
        comm.all_reduce(x)
        assert x.unique().tolist() == [6.0]

    ranks(3, work)


def test_tensors_of_one_integer_are_indices_too() -> None:
    def work(comm: Any) -> list[int]:
        with pytest.raises(InvalidArgumentError, match="no root tensor"):
            comm.broadcast(np.ones(1), torch.tensor([True]))
        with pytest.raises(InvalidArgumentError, match="no root tensor"):
            comm.broadcast(np.ones(1), torch.tensor(0.0))
        with pytest.raises(InvalidArgumentError, match="no root"):
            comm.broadcast(np.ones(1), torch.tensor(0, device="meta"))
        found: list[int] = comm.broadcast(np.full(2, comm.rank), torch.tensor(1)).tolist()
        return found

    assert rd.run(work, 2, "threads") == [[1, 1]] * 2
