"""Registered tensors: storages that end, move or are shared, models, and tensors from the arena."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.errors import InvalidArgumentError, NoRoomError

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """A fork has none of OpenMP's threads, and would wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def used(comm: Any) -> int:
    gc.collect()
    comm.barrier()
    world = comm._engine.world
    if comm.rank == 0:
        world.release(world.allocate(1), 1)
    comm.barrier()
    found = int(world.used)
    comm.barrier()
    return found


def moved(comm: Any, x: Any) -> Any:
    """Return the bytes that an all-reduce on it moves, by which ways."""
    before = np.array(comm._engine.moved())
    comm.all_reduce(x)
    return (np.array(comm._engine.moved()) - before).tolist()


DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "complex64", "uint8")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_registered_tensor_gets_the_bits_of_an_ordinary_one(dtype: str, ranks: Any) -> None:
    def work(comm: Any) -> None:
        before = used(comm)
        for count, first in product((33_000, 100_001), (0, 1, 900)):
            generator = torch.Generator().manual_seed(comm.rank)
            values = (torch.randn(count, generator=generator) * 50).to(getattr(torch, dtype))
            x, plain = values.clone(), values.clone()
            view, where, version = x[first:], x.data_ptr(), x._version
            assert comm.register(view) == x.untyped_storage().nbytes()
            assert x._version == version
            for one in (view, plain[first:]):
                comm.all_reduce(one)
                comm.broadcast(one, comm.size - 1)
                comm.start.all_reduce(one).wait()
                comm.all_reduce(one.view(-1)[::2])  # by the long way
            assert x.data_ptr() == where
            assert torch.equal(x.view(torch.uint8), plain.view(torch.uint8))
            del x, view, plain, one
        assert used(comm) == before

    ranks(2, work)
    ranks(3, work)


def test_it_goes_by_the_way_of_the_arena(ranks: Any) -> None:
    """Whichever of those who share the memory is passed."""

    def work(comm: Any) -> None:
        arena = torch.from_numpy(comm.empty(50_000))
        x, ordinary = (torch.ones(50_000, dtype=torch.float64) for _ in range(2))
        assert comm.register(x) == x.nbytes
        wanted = moved(comm, arena)
        assert moved(comm, ordinary) != wanted
        array = np.ones(50_000)
        assert comm.register(torch.from_numpy(array)) == array.nbytes  # gone with the tensor
        assert comm.unregister(array) == 0
        assert (array == 1).all()
        assert comm.register(array) == array.nbytes
        for same in (x, x.view(100, 500), x.numpy(), torch.from_numpy(array), array, x.detach()):
            assert moved(comm, same) == wanted

    ranks(2, work)


def test_parameters_and_buffers_of_a_model_move(ranks: Any) -> None:
    def work(comm: Any) -> None:
        before = used(comm)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(200, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 200)
        )
        model.register_buffer("table", torch.ones(20_000))
        places = {name: p.data_ptr() for name, p in model.named_parameters()}
        kept = {name: p.detach().clone() for name, p in model.state_dict().items()}
        assert comm.register(model) == 2 * 240_000 + 80_000  # all others are small
        assert comm.register(model.state_dict()) == 2 * 240_000 + 80_000
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(torch.ones(4, 200)).sum().backward()
        for parameter in model.parameters():
            comm.register([parameter.grad])
            comm.all_reduce(parameter.grad, "avg")
        optimizer.step()
        optimizer.zero_grad()
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
        model.load_state_dict(kept)
        assert all(torch.equal(p, kept[name]) for name, p in model.state_dict().items())
        assert comm.unregister(model) == 2 * 240_000 + 80_000
        comm.register(model)
        del model, optimizer, parameter
        assert used(comm) == before

    ranks(2, work)


def mapping_of(at: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(word, 16) for word in line.split()[0].split("-"))
        if start <= at < end:
            return line
    return ""


@pytest.mark.parametrize("count", [50_000, 6_000_000], ids=["heap", "own mapping"])
def test_memory_goes_back_before_torch_frees_it(count: int, ranks: Any) -> None:
    """Whoever has the storage last: a view, autograd, a parameter, an array."""

    def work(comm: Any) -> None:
        before = used(comm)
        for last in ("view", "parameter", "array", "graph"):
            x = torch.ones(count, dtype=torch.float64)
            place = x.data_ptr() + 8192
            comm.register(x)
            if last == "view":
                kept: Any = x[7:]
            elif last == "parameter":
                kept = torch.nn.Parameter(x)
            elif last == "array":
                kept = x.numpy()[3:]
            else:
                kept = (torch.nn.Parameter(x) ** 2).sum()
            del x
            assert used(comm) > before
            assert "memfd" in mapping_of(place)
            del kept
            assert used(comm) == before
            assert "memfd" not in mapping_of(place)

    ranks(2, work)


def test_a_registered_tensor_can_not_be_resized(ranks: Any) -> None:
    def work(comm: Any) -> None:
        x = torch.ones(50_000)
        comm.register(x)
        with pytest.raises(RuntimeError, match="not resizable"):
            x[:].resize_(100_000)
        with pytest.raises(RuntimeError, match="not resizable"):
            x.untyped_storage().resize_(0)
        assert (comm.all_reduce(x) == comm.size).all()

    ranks(2, work)


def test_memory_that_went_another_way_is_never_taken_for_registered(processes: Any) -> None:
    """`share_memory_` gives a storage other memory; arrays that then get the old one are right."""

    def work(comm: Any) -> None:
        in_heap = []
        while "[heap]" in mapping_of((x := torch.ones(10_000_000)).data_ptr()):
            in_heap.append(x)  # until one has pages of its own, which go at once
        comm.register(x)
        place = -(-x.data_ptr() // 4096) * 4096
        x.share_memory_()
        assert x.data_ptr() < place or x.data_ptr() > place + x.nbytes
        assert not mapping_of(place + 8192)
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        count, private_anonymous_here = 9_000_000, 0x100022
        assert libc.mmap(place, 4 * count, 3, private_anonymous_here, -1, 0) == place
        other = np.ctypeslib.as_array((ctypes.c_float * count).from_address(place))
        for part in (slice(None), slice(5, 60_000), slice(8_000_000, None)):
            other[:] = 1
            assert (comm.all_reduce(other[part]) == comm.size).all()
            assert (comm.all_reduce(torch.from_numpy(other)[part]) == comm.size**2).all()
        assert (comm.all_reduce(x) == comm.size).all()
        other[:] = 1
        del x
        gc.collect()
        assert (other == 1).all()
        assert (comm.all_reduce(other) == comm.size).all()

    processes(2, work)


def test_what_can_not_move_is_refused_by_name(tmp_path: Path, ranks: Any) -> None:
    file = tmp_path / "weights.pt"
    torch.save({"w": torch.ones(50_000)}, file)

    def work(comm: Any) -> None:
        good = torch.ones(50_000)
        bad = [
            (torch.ones(50_000).share_memory_(), "not ordinary memory of this process alone"),
            (torch.load(file, mmap=True)["w"], "not ordinary memory of this process alone"),
            (torch.frombuffer(bytearray(400_000), dtype=torch.uint8).to_sparse(), "to_dense"),
            (torch.ones(50_000, device="meta"), "meta"),
            (torch.nn.Linear(200, 200, device="meta"), "meta"),
        ]
        for x, words in bad:
            with pytest.raises(InvalidArgumentError, match=words):
                comm.register([good, x])
            assert comm.unregister(good) == 0
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.ones(200, 200).to_sparse())
        with pytest.raises(InvalidArgumentError, match="register of weight needs a plain dense"):
            comm.register(model)

    ranks(2, work)


def test_a_forked_child_shares_the_tensor(processes: Any) -> None:
    def work(comm: Any) -> None:
        x, y = torch.ones(50_000), torch.ones(50_000)
        comm.register([x, y])
        pid = os.fork()
        if pid == 0:
            status = 3
            try:
                x[2000] = 7
                del y
                [torch.full((n,), 9.0) for n in range(5000, 60_000, 5000)]
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert x[2000] == 7
        assert (comm.all_reduce(y) == comm.size).all()

    processes(2, work)


def test_engines_without_an_arena_leave_arrays_as_they_are() -> None:
    def work(comm: Any) -> Any:
        x = torch.ones(50_000)
        found = comm.register([x, np.ones(50_000)]), comm.unregister(x)
        with rd.arena_arrays(comm):
            y = torch.ones(50_000) + torch.from_numpy(np.ones(50_000))
        return *found, float(comm.all_reduce(x)[-1]), float(comm.all_reduce(y)[0])

    assert rd.run(work, 2, "gloo") == [(0, 0, 2.0, 4.0)] * 2


# ---- tensors that come from the arena


def holds(comm: Any, x: Any) -> bool:
    return bool(comm._engine.world.holds(x.data_ptr()))


MADE = {
    "empty": lambda: torch.empty(200, 100),
    "zeros": lambda: torch.zeros(200, 100),
    "ones_like": lambda: torch.ones_like(torch.empty(200, 100)),
    "randn": lambda: torch.randn(200, 100),
    "tensor": lambda: torch.tensor(np.ones((200, 100)).tolist()),
    "bfloat16": lambda: torch.ones(200, 200, dtype=torch.bfloat16),
    "strided": lambda: torch.empty_strided((100, 200), (1, 100)).fill_(1),
    "clone": lambda: torch.ones(100, 200).t().clone(memory_format=torch.contiguous_format),
    "arithmetic": lambda: torch.ones(200, 100) * 3 + 1,
    "parameter": lambda: torch.nn.Linear(100, 200).weight.data,
    "several": lambda: torch.ones(300, 200).sort()[0],
    "stacked": lambda: torch.stack([torch.ones(50, 100)] * 4),
}


@pytest.mark.parametrize("made", MADE)
def test_arena_arrays_has_torch_make_the_same_tensors_there(made: str, ranks: Any) -> None:
    def work(comm: Any) -> None:
        before = used(comm)
        generator = torch.random.get_rng_state()
        plain = MADE[made]()
        torch.random.set_rng_state(generator)
        with rd.arena_arrays(comm):
            x = MADE[made]()
        assert holds(comm, x)
        assert not holds(comm, plain)
        assert (x.shape, x.stride(), x.dtype) == (plain.shape, plain.stride(), plain.dtype)
        assert made == "empty" or ranks.kind == "threads" or torch.equal(x, plain)
        assert comm.register(x) == x.nbytes
        comm.broadcast(x)
        del x
        assert used(comm) == before

    ranks(2, work)


def test_a_model_made_there_trains_as_any_other(processes: Any) -> None:
    def work(comm: Any) -> None:
        def trained() -> list[Any]:
            torch.manual_seed(1)
            model = torch.nn.Sequential(
                torch.nn.Linear(100, 200), torch.nn.ReLU(), torch.nn.Linear(200, 100)
            )
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(3):
                model(torch.randn(100, 100)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return list(model.parameters())

        with rd.arena_arrays(comm):
            made = trained()
        assert [holds(comm, p) for p in made] == [True, False, True, False]
        assert all(torch.equal(one, other) for one, other in zip(made, trained(), strict=True))

    processes(2, work)


def test_tensors_that_find_no_room_say_so(ranks: Any) -> None:
    def work(comm: Any) -> None:
        with rd.arena_arrays(comm), pytest.raises(NoRoomError, match="arena_arrays: this host"):
            torch.ones(1 << 21)
        assert (comm.all_reduce(torch.ones(1 << 21)) == comm.size).all()

    ranks(2, work, arena=3 << 20)
