"""The engine for GPUs, by its twin: the same code with Gloo in NCCL's place and tensors of the CPU.

What only a GPU can show is in nccl_on_gpu.py, to be run where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.algorithms import algorithms
from roundelay.communicator import buffers
from roundelay.communicator.selection import Selection
from roundelay.engines import run_schedule
from roundelay.engines.gloo.groups import fork_at
from roundelay.engines.nccl import Nccl
from roundelay.errors import InvalidArgumentError
from roundelay.processes.wire import decode, encode
from roundelay.rendezvous.by_store import StoreRendezvous

torch = pytest.importorskip("torch")

DTYPES = ("bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32", "complex64")
KINDS = {"avg": "fc", "max": "biuf", "bxor": "biu", "lxor": "biufc"}


@pytest.fixture
def seen_as_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every tensor for one of a device, those of the CPU too."""
    monkeypatch.setattr(buffers, "HOST", [])


def on_ranks(work: Any, size: int) -> list[Any]:
    def body(meeting: StoreRendezvous) -> bytes:
        end = Nccl(
            meeting,
            Selection,
            timeout=60,
            library="gloo",
        )
        comm = rd.Communicator(end)
        result = encode(work(comm))
        comm.close()
        return result

    return [decode(result) for result in fork_at(size, body)]


def sample(dtype: str, count: int, rank: int) -> Any:
    values = (torch.arange(count) * 7 + rank * 3) % 4
    return values.to(getattr(torch, dtype))


def total(op: str, dtype: str, count: int, size: int) -> Any:
    """Return what a reduction gives, computed in wide numbers; one rank alone folds nothing."""
    if size == 1:
        return sample(dtype, count, 0)
    wide = torch.stack([sample(dtype, count, rank).to(torch.complex128) for rank in range(size)])
    if op in ("sum", "avg"):
        result = wide.sum(0) / (size if op == "avg" else 1)
        result = result.ne(0) if dtype == "bool" else result
    elif op == "max":
        result = wide.real.amax(0)
    elif op == "bxor":
        result = torch.zeros(count, dtype=torch.int64)
        for row in wide.real.to(torch.int64):
            result ^= row
    else:
        result = wide.ne(0).sum(0) % 2
    kind = getattr(torch, dtype)
    return result.to(kind) if result.is_complex() == kind.is_complex else result.real.to(kind)


def takes(op: str, dtype: str) -> bool:
    kind = "f" if "float" in dtype else np.dtype(dtype).kind
    return kind in KINDS.get(op, "biufc")


def cases(comm: rd.Communicator) -> Iterator[tuple[str, Any, Any]]:
    size, rank = comm.size, comm.rank
    for dtype in DTYPES:
        for count in (0, 1, 1000):
            mine = sample(dtype, count, rank)
            every = torch.stack([sample(dtype, count, other) for other in range(size)])
            for op in ("sum", "avg", "max", "bxor", "lxor"):
                if not takes(op, dtype):
                    continue
                due = total(op, dtype, count, size)
                what = f"{op} {dtype}[{count}]"
                yield f"all_reduce {what}", comm.all_reduce(mine.clone(), op), due
                yield f"out= {what}", comm.all_reduce(mine, op, out=torch.empty_like(mine)), due
                at_root = comm.reduce(mine.clone(), op, size - 1)
                yield f"reduce {what}", at_root, due if rank == size - 1 else None
                rows = every if rank == 0 else every.clone()
                shares = comm.reduce_scatter(rows, op)
                yield f"reduce_scatter {what}", shares.shape, mine.shape
            yield f"kept {dtype}", mine, sample(dtype, count, rank)
            yield f"all_gather {dtype}", comm.all_gather(mine), every
            yield f"gather {dtype}", comm.gather(mine, 0), every if rank == 0 else None
            yield (
                f"all_to_all {dtype}",
                comm.all_to_all(every.clone()),
                torch.stack([every[rank]] * size),
            )
            there = mine.clone() if rank == 0 else torch.zeros_like(mine)
            yield f"broadcast {dtype}", comm.broadcast(there), sample(dtype, count, 0)
            into = torch.zeros_like(mine)
            yield f"scatter {dtype}", comm.scatter(every if rank == 0 else None, out=into), mine


def differing(comm: rd.Communicator) -> list[str]:
    wrong = []
    for what, found, due in cases(comm):
        same = found is due if found is None or due is None else (
            torch.equal(found, due) if isinstance(due, torch.Tensor) else found == due
        )  # fmt: skip
        if not same:
            wrong.append(f"{what}: {found} instead of {due}"[:200])
    return wrong


@pytest.mark.usefixtures("seen_as_devices")
def test_tensors_of_a_device_through_every_collective() -> None:
    for size in (1, 3):
        assert on_ranks(differing, size) == [[]] * size


@pytest.mark.usefixtures("seen_as_devices")
def test_what_has_no_word_on_the_device_goes_by_the_host() -> None:
    def work(comm: rd.Communicator) -> list[Any]:
        rank, size = comm.rank, comm.size
        tensor = torch.full((2, 3), rank + 1.0)
        strided = torch.arange(12.0).reshape(3, 4).t()[1:3] + rank
        largest = comm.all_reduce(torch.tensor([float(rank), -1.0]), "maxloc")
        first = rd.Op(lambda a, _: a, commutative=False)
        message = comm.sendrecv(tensor, (rank + 1) % size, torch.zeros(2, 3), (rank - 1) % size)
        handle = comm.start.all_reduce(torch.ones(5))
        nan = comm.all_reduce(torch.tensor([float("nan") if rank == 0 else 1.0]), "max")
        part = comm.split(0)
        assert part is not None
        counts = [other + 1 for other in range(size)]
        uneven = comm.all_gather(torch.full((rank + 1,), rank), axis=0, counts=counts)
        return [
            comm.scan(tensor.clone())[0, 0].item(),
            comm.exscan(tensor.clone())[1, 2].item(),
            comm.all_reduce(strided.clone().t().contiguous().t())[0, 0].item(),
            largest.locations.tolist(),
            comm.all_reduce(torch.tensor([rank]), first).tolist(),
            message[0, 0].item(),
            handle.wait().tolist(),
            bool(nan.isnan()),
            part.all_reduce(torch.ones(1)).item(),
            uneven.tolist(),
            comm.all_reduce(np.ones(2)).tolist(),
        ]

    for rank, found in enumerate(on_ranks(work, 3)):
        assert found == [
            [1.0, 3.0, 6.0][rank], [1.0, 1.0, 3.0][rank], 6.0, [2, 0], [0],
            float((rank - 1) % 3 + 1), [3.0] * 5, True, 3.0, [0, 1, 1, 2, 2, 2], [3.0, 3.0],
        ]  # fmt: skip


def test_without_gpus_the_error_names_another_engine() -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    ring = algorithms.load("all_reduce_ring").schedule(2)
    with pytest.raises(InvalidArgumentError, match=r"needs a GPU for each of the 2 ranks.*gloo"):
        run_schedule(ring, [np.ones(2)] * 2, "nccl")
