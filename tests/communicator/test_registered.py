"""Registered arrays: the bits of ordinary ones by the way of the arena, at the same address."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay import _core
from roundelay.errors import (
    CommunicationError,
    InvalidArgumentError,
    NoRoomError,
)

SIZES = (1, 2, 3, 4, 7)
LEAST = 32 * 1024  # bytes that move
Call = Callable[[Any, Any, Any], Any]  # of a communicator, x of so many rows, and a maker of more

CALLS: dict[str, Call] = {
    "all_reduce": lambda comm, x, _: comm.all_reduce(x),
    "all_reduce out": lambda comm, x, new: comm.all_reduce(x, out=new(x.shape)),
    "all_reduce prod": lambda comm, x, _: comm.all_reduce(x, "prod"),
    "all_reduce ring": lambda comm, x, _: comm.all_reduce(x, algorithm="ring"),
    "reduce": lambda comm, x, _: comm.reduce(x, root=comm.size - 1),
    "broadcast": lambda comm, x, _: comm.broadcast(x, comm.size - 1),
    "all_gather": lambda comm, x, new: comm.all_gather(x[0], out=new(x.shape)),
    "all_gather in place": lambda comm, x, _: comm.all_gather(x[comm.rank], out=x),
    "all_gather uneven": lambda comm, x, _: comm.all_gather(
        x.reshape(-1)[: 30_000 - comm.rank], axis=0, counts=[30_000 - r for r in range(comm.size)]
    ),
    "gather": lambda comm, x, new: comm.gather(x[0], out=new(x.shape)),
    "scatter": lambda comm, x, new: comm.scatter(x, out=new(x.shape[1:])),
    "reduce_scatter": lambda comm, x, new: comm.reduce_scatter(x, out=new(x.shape[1:])),
    "reduce_scatter in place": lambda comm, x, _: comm.reduce_scatter(x, out=x[comm.rank]),
    "all_to_all": lambda comm, x, new: comm.all_to_all(x, out=new(x.shape)),
    "scan": lambda comm, x, _: comm.scan(x),
    "exscan": lambda comm, x, _: comm.exscan(x),
    "every other": lambda comm, x, _: comm.all_reduce(x.reshape(-1)[::2]),
    "in the background": lambda comm, x, _: [
        handle.wait() for handle in [comm.start.all_reduce(x), comm.start.all_reduce(x, "prod")]
    ],
}
DTYPES = ("int8", "int64", "float16", "float32", "float64", "complex128")


def address(x: Any) -> int:
    return int(x.ctypes.data)


def arena_bytes(comm: Any) -> int:
    """Return how far the arena is in use, once all that was given back is counted as free."""
    gc.collect()
    comm.barrier()
    world = comm._engine.world
    if comm.rank == 0:
        world.release(world.allocate(1), 1)
    comm.barrier()
    used = int(world.used)
    comm.barrier()
    return used


def numbers(comm: Any, count: int, dtype: str, seed: int = 0) -> Any:
    made = np.random.default_rng([comm.rank, seed]).standard_normal(count) * 50
    return made.astype(dtype)


@pytest.mark.parametrize(("call", "dtype"), list(product(CALLS, DTYPES)))
def test_a_registered_array_gets_the_bits_of_an_ordinary_one(
    call: str, dtype: str, ranks: Any
) -> None:
    """Also a part of one that begins and ends anywhere; and all around stays as it was."""

    def work(comm: Any) -> None:
        before = arena_bytes(comm)
        for first, count in product((0, 1, 700), (20_001, 50_000)):
            outcomes = []
            for registered in (False, True):
                made: list[Any] = []

                def new(shape: Any, made: list[Any] = made, at: Any = (first, registered)) -> Any:
                    room = numbers(comm, int(np.prod(shape)) + at[0] + 3, dtype, 1)
                    if at[1]:
                        assert comm.register(room) == (room.nbytes if room.nbytes >= LEAST else 0)
                    made.append(room)
                    return room[at[0] : -3].reshape(shape)

                x = new((comm.size, count))
                where = [address(each) for each in made]
                result = CALLS[call](comm, x, new)
                assert [address(each) for each in made[: len(where)]] == where
                parts = result if isinstance(result, list) else [result]
                told = [None if part is None else part.tobytes() for part in parts]
                outcomes.append((told, [each.tobytes() for each in made]))
            assert outcomes[0] == outcomes[1]
            del x, made, new, result, parts
        assert arena_bytes(comm) == before

    with np.errstate(all="ignore"):
        for size in (2, 3):
            ranks(size, work)


@pytest.mark.parametrize("size", SIZES)
def test_it_goes_by_the_way_of_the_arena(size: int, ranks: Any) -> None:
    """The bytes that ranks hand one another are those of arrays from `comm.empty`."""

    def work(comm: Any) -> None:
        def moved(x: Any) -> Any:
            before = np.array(comm._engine.moved())
            comm.all_reduce(x)
            return (np.array(comm._engine.moved()) - before).tolist()

        x, ordinary, arena = np.ones(50_000), np.ones(50_000), comm.empty(50_000)
        arena[:] = 1
        assert comm.register(x) == x.nbytes
        assert moved(x) == moved(arena)
        assert comm.size == 1 or moved(ordinary) != moved(arena)
        assert comm.unregister(x) == x.nbytes
        assert moved(x) == moved(ordinary)

    ranks(size, work)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_ranks_may_register_or_not(size: int, ranks: Any) -> None:
    def work(comm: Any) -> None:
        for pattern in range(1 << comm.size) if comm.size < 4 else (1, 0b10, 0b101):
            x, out = np.full(40_000, comm.rank + 1.0), np.zeros(40_000)
            if pattern >> comm.rank & 1:
                comm.register(x)
            if pattern >> (comm.rank + 1) % comm.size & 1:
                comm.register(out)
            comm.all_reduce(x, out=out)
            assert (out == comm.size * (comm.size + 1) / 2).all()
            assert (comm.broadcast(x, comm.size - 1) == comm.size).all()

    ranks(size, work)


def test_views_that_were_there_see_what_comes(ranks: Any) -> None:
    def work(comm: Any) -> None:
        x = np.arange(60_000.0).reshape(200, 300)
        views: list[Any] = [x[3:-1, 5:], x.T, x.reshape(-1)[7::3], x.data, x.view(np.int64)]
        copies = [np.array(view) for view in views]
        assert comm.register(views[0]) == x.nbytes  # a part stands for the whole
        assert comm.register([x, views[1]]) == 2 * x.nbytes  # which is there already
        assert all((np.array(v) == c).all() for v, c in zip(views, copies, strict=True))
        comm.all_reduce(x)
        pairs = zip(views[:3], copies[:3], strict=True)
        assert all((np.array(v) == c * comm.size).all() for v, c in pairs)
        views[0][:] = -1
        assert (comm.all_reduce(x)[3:-1, 5:] == -comm.size).all()

    ranks(3, work)


def test_what_takes_it_is_an_array_or_holds_some(ranks: Any) -> None:
    def work(comm: Any) -> None:
        x = [np.ones(5000 * n) for n in range(1, 4)]
        assert comm.register(each for each in x[:2]) == 120_000
        assert comm.register({"a": x[2], "b": (x[0], [x[1]])}["b"]) == 120_000
        assert comm.register({"a": x[2]}) == x[2].nbytes
        assert comm.unregister(x) == 240_000
        assert comm.unregister(x) == comm.unregister([]) == comm.register(()) == 0

    ranks(2, work)


@pytest.mark.parametrize("count", [0, 1, 100, 512, 4095])
def test_what_is_too_small_to_gain_stays(count: int, ranks: Any) -> None:
    def work(comm: Any) -> None:
        before, x = arena_bytes(comm), np.ones(count)
        assert comm.register(x) == 0
        assert arena_bytes(comm) == before
        assert (comm.all_reduce(x) == comm.size).all()

    ranks(2, work)


def test_a_read_only_array_can_be_sent_from_there(ranks: Any) -> None:
    def work(comm: Any) -> None:
        x = np.ones(50_000)
        x.flags.writeable = False
        assert comm.register(x) == x.nbytes
        assert (comm.all_reduce(x, out=np.empty(50_000)) == comm.size).all()
        with pytest.raises(InvalidArgumentError, match="read-only"):
            comm.all_reduce(x)

    ranks(2, work)


# ---- how it ends


def test_memory_goes_back_with_the_array(ranks: Any) -> None:
    def work(comm: Any) -> None:
        before = arena_bytes(comm)
        for _ in range(3):
            held = [np.ones(100_000 + 777 * n) for n in range(5)]
            view = held[2][5:10]
            comm.register(held)
            comm.all_reduce(held[1])
            assert arena_bytes(comm) > before
            del held[:2], held[1:]
            assert arena_bytes(comm) > before
            del held
            assert arena_bytes(comm) > before  # the view has the third
            assert (view == 1).all()
            del view
            assert arena_bytes(comm) == before

    ranks(3, work)


def test_unregistered_it_is_an_ordinary_array_with_what_was_in_it(ranks: Any) -> None:
    def work(comm: Any) -> None:
        x = np.ones(100_003)
        where = address(x)
        for n in range(1, 4):
            comm.register(x)
            comm.all_reduce(x)
            assert comm.unregister(x[5:9]) == x.nbytes
            assert (address(x), x.min(), x.max()) == (where, comm.size**n, comm.size**n)
            assert "memfd" not in mapping_of(where + 8192)
        x.resize(200_000, refcheck=False)
        assert (x[:100_003] == comm.size**3).all()

    ranks(2, work)


def mapping_of(at: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(word, 16) for word in line.split()[0].split("-"))
        if start <= at < end:
            return line
    raise AssertionError(f"nothing lies at {at:x}")


def test_a_registered_array_can_not_be_resized(ranks: Any) -> None:
    def work(comm: Any) -> None:
        x = np.ones(50_000)
        comm.register(x)
        with pytest.raises(ValueError, match="resize"):
            x.resize(100_000, refcheck=False)
        assert (comm.all_reduce(x) == comm.size).all()

    ranks(2, work)


def test_it_is_not_taken_from_under_a_call(ranks: Any) -> None:
    def work(comm: Any) -> None:
        x = np.ones(100_000)
        comm.register(x)
        if comm.rank == 0:
            handle = comm.start.all_reduce(x)
            while comm._engine.world.calls(comm._engine.at)[2][0][2][0] < 1:
                pass
            with pytest.raises(InvalidArgumentError, match="unregister can't move x: a call on it"):
                while comm.unregister(x) == 0:  # until it has begun on its thread
                    comm.register(x)
            comm.send(np.ones(1), 1)
            handle.wait()
        else:
            comm.recv(np.empty(1), 0)
            comm.all_reduce(x)
        assert (x == comm.size).all()
        assert comm.unregister(x) == x.nbytes

    ranks(2, work)


def test_a_call_keeps_what_nobody_else_does(ranks: Any) -> None:
    def work(comm: Any) -> None:
        before = arena_bytes(comm)
        x = np.ones(100_000)
        comm.register(x)
        handle = comm.start.all_reduce(x)
        del x
        gc.collect()
        assert (handle.wait() == comm.size).all()
        del handle
        assert arena_bytes(comm) == before

    ranks(3, work)


def test_after_close_the_array_is_as_good_as_any(ranks: Any) -> None:
    def work(comm: Any) -> tuple[Any, Any]:
        x, y = np.ones(100_000), np.ones(100_000)
        comm.register([x, y])
        comm.all_reduce(x)
        comm.close()
        x += 1
        with pytest.raises(InvalidArgumentError, match="closed"):
            comm.register(np.ones(100_000))
        assert comm.unregister(y) == y.nbytes
        y += 1
        return x, y

    for x, y in ranks(2, work):
        assert (x == 3).all()
        assert (y == 2).all()


def test_one_arena_serves_all_groups_of_a_job(ranks: Any) -> None:
    def work(comm: Any) -> None:
        x = np.ones(50_000)
        group = comm.split(comm.rank % 2)
        assert group.register(x) == comm.register(x) == x.nbytes
        comm.all_reduce(x)
        group.all_reduce(x)
        assert (x == comm.size * group.size).all()
        del group
        gc.collect()
        x[:] = 1
        assert (comm.all_reduce(x) == comm.size).all()
        assert comm.unregister(x) == x.nbytes

    ranks(4, work)


def test_an_array_lies_in_one_job_alone(threads: Any) -> None:
    def work(comm: Any) -> None:
        x = np.ones(50_000)
        comm.register(x)

        def inner(other: Any) -> None:
            with pytest.raises(InvalidArgumentError, match="another job"):
                other.register(x)
            assert (other.all_reduce(x) == 1).all()

        rd.run(inner, 1, "threads")
        assert (comm.all_reduce(x) == 1).all()

    threads(1, work)


def test_ranks_that_are_threads_may_register_the_same_array(threads: Any) -> None:
    x = np.ones(50_000)

    def work(comm: Any) -> None:
        assert comm.register(x) == x.nbytes
        out = np.empty(50_000)
        assert (comm.all_reduce(x, out=out) == comm.size).all()

    threads(4, work)


# ---- refused by name


class Foreign(ctypes.Structure):
    _fields_ = (("values", ctypes.c_double * 10_000),)


def test_what_can_not_move_is_refused_by_name(tmp_path: Path, ranks: Any) -> None:
    file = tmp_path / "values"
    np.ones(50_000).tofile(file)

    def work(comm: Any) -> None:
        good = np.ones(50_000)
        bad: list[tuple[Any, str]] = [
            (np.memmap(file, float, "r+"), "belongs to a mmap"),
            (np.memmap(file, float, "c"), "belongs to a mmap"),
            (np.ctypeslib.as_array(Foreign().values), "belongs to a"),
            (np.frombuffer(bytes(400_000)), "belongs to a bytes"),
            (np.frombuffer(bytearray(400_000)), "belongs to a (bytearray|memoryview)"),
            (np.ones(50_000).astype(object), "dtype object"),
            (np.ma.ones(50_000), "masks"),
            (3.5, "register takes numpy arrays"),
            ("text", "register takes numpy arrays"),
            (bytearray(400_000), "register takes numpy arrays"),
            (None, "register takes numpy arrays"),
        ]
        for x, words in bad:
            with pytest.raises(InvalidArgumentError, match=words):
                comm.register([good, x])
            assert comm.unregister(good) == 0  # nothing has moved
        for x, _ in bad[:5]:
            with pytest.raises(InvalidArgumentError, match=r"x\['weights'\]"):
                comm.register({"weights": x})
        assert (comm.all_reduce(good) == comm.size).all()

    ranks(2, work)


def test_memory_of_a_file_or_that_is_shared_stays_where_it_is(ranks: Any) -> None:
    """Whoever says that it is theirs: the kernel is asked."""

    def work(comm: Any) -> None:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        x = np.ones(60_000)
        first = -(-address(x) // 4096) * 4096
        shared_anonymous_fixed = 0x31
        libc.mmap(first + 8192, 4096, 3, shared_anonymous_fixed, -1, 0)
        x[:] = 2
        with pytest.raises(InvalidArgumentError, match="not ordinary memory of this process alone"):
            comm.register(x)
        assert (comm.all_reduce(x) == 2 * comm.size).all()
        private_anonymous_fixed = 0x32
        libc.mmap(first + 8192, 4096, 3, private_anonymous_fixed, -1, 0)
        x[:] = 3
        assert comm.register(x) == x.nbytes

    ranks(2, work)


def test_a_full_arena_is_told_and_nothing_has_moved(ranks: Any) -> None:
    def work(comm: Any) -> None:
        before = arena_bytes(comm)
        small, large = np.ones(50_000), np.ones(1 << 20)
        with pytest.raises(NoRoomError, match="register: this host has no room for 8788608"):
            comm.register([small, large])
        assert comm.unregister([small, large]) == 0
        assert arena_bytes(comm) == before
        assert comm.register(small) == small.nbytes
        assert (comm.all_reduce(large) == comm.size).all()
        assert (comm.all_reduce(small) == comm.size).all()

    ranks(2, work, arena=3 << 20)


def test_a_broken_group_says_why(ranks: Any) -> None:
    def work(comm: Any) -> None:
        x, y = np.ones(50_000), np.ones(50_000)
        comm.register(x)  # which waits for nobody
        if comm.rank == 1:
            comm.recv(np.empty(1), 0)
            raise KeyError("on purpose")
        comm.send(np.ones(1), 1)
        with pytest.raises(CommunicationError, match="on purpose"):
            comm.recv(np.empty(1), 1)
        with pytest.raises(CommunicationError, match="on purpose"):
            comm.register(y)
        assert comm.unregister(x) == x.nbytes
        x += 1

    found = ranks.outcomes(2, work)
    assert [one.error for one in found] == ["", "KeyError"], found[0].trace


# ---- what else is in the process


def test_neighbours_on_the_heap_keep_what_is_theirs(processes: Any) -> None:
    """Where malloc puts arrays side by side, on pages that they share with all else."""

    def work(comm: Any) -> None:
        ctypes.CDLL(None).mallopt(-3, 1 << 30)  # from now on nothing has pages of its own
        rng = random.Random(3)
        held = [np.full(rng.randrange(4100, 30_000), float(n)) for n in range(40)]
        assert "[heap]" in mapping_of(address(held[20]))
        for turn in range(30):
            chosen = rng.sample(range(len(held)), 8)
            comm.register([held[n] for n in chosen[:6]])
            for n in chosen[2:]:
                comm.all_reduce(held[n], "max")
            comm.unregister([held[n] for n in chosen[4:]])
            for n in chosen[:2]:
                assert (held[n] == n).all()
                held[n] = np.full(rng.randrange(4100, 30_000), float(n))
            assert all((each == n).all() for n, each in enumerate(held)), turn
        # Freed memory is private again, whoever gets it.
        first = address(held[0])
        del held
        gc.collect()
        assert "memfd" not in mapping_of(first + 8192)

    processes(2, work)


def test_a_forked_child_shares_the_array_and_lets_go_of_it_alone(processes: Any) -> None:
    """As arrays of `comm.empty` are: what one writes the other sees; nothing else is shared."""

    def work(comm: Any) -> None:
        ctypes.CDLL(None).mallopt(-3, 1 << 30)
        x, y, beside = np.ones(50_000), np.ones(50_000), np.ones(50_000)
        comm.register([x, y])
        pid = os.fork()
        if pid == 0:
            status = 3
            try:
                x[2000] = 7
                beside[:] = 7
                place = address(y)
                del y
                gc.collect()
                private = "memfd" not in mapping_of(place + 8192)
                churn = [np.full(n, 9.0) for n in range(4000, 60_000, 3000)]  # in freed memory
                del churn
                try:
                    comm.register(np.ones(50_000))
                except CommunicationError:
                    status = 0 if private else 4
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert x[2000] == 7
        assert (y == 1).all()
        assert (beside == 1).all()
        x[2000] = 1
        assert (comm.all_reduce(x) == comm.size).all()
        assert (comm.all_reduce(y) == comm.size).all()

    processes(2, work)


@pytest.mark.parametrize("seed", range(6))
def test_any_story_ends_as_with_ordinary_arrays(seed: int, ranks: Any) -> None:  # noqa: C901
    """Make, register, write, call, unregister and drop in any order, beside a twin untouched."""

    def work(comm: Any) -> None:
        before = arena_bytes(comm)
        rng, own = random.Random(seed), random.Random(f"{seed} {comm.rank}")
        pairs: list[tuple[Any, Any]] = []
        for _ in range(120):
            what = rng.choice(["make", "register", "write", "call", "call", "unregister", "drop"])
            if what == "make" or not pairs:
                count = rng.choice([3000, 4096, 4100, 20_000, 70_001])
                one = np.full(count, float(comm.rank))
                pairs.append((one, one.copy()))
                continue
            one, twin = pairs[rng.randrange(len(pairs))]
            start = rng.randrange(one.size // 2)
            if what == "register" and own.random() < 0.8:
                comm.register(one[start:])
            elif what == "unregister" and own.random() < 0.8:
                comm.unregister(one[start:])
            elif what == "write":
                for each in (one, twin):
                    each[start:] += comm.rank
            elif what == "call":
                for each in (one, twin):
                    comm.all_reduce(each[start:], "avg")
            elif what == "drop":
                pairs = [pair for pair in pairs if pair[0] is not one]
            assert all(one.tobytes() == twin.tobytes() for one, twin in pairs)
        del pairs, one, twin
        assert arena_bytes(comm) == before

    ranks(3, work)


AT_EXIT = """
import numpy as np
import roundelay as rd
comm = rd.init()
kept = [np.ones(50_000), np.ones(6_000_000)]
comm.register(kept)
{more}
"""


@pytest.mark.parametrize(
    "more",
    [
        "comm.all_reduce(kept[0])",
        "comm.close()",
        "del comm",
        "import atexit; atexit.register(lambda: kept.clear())",
        "kept.append(kept)",
        "class Last:\n    def __del__(self, kept=kept):\n        kept[0] += 1\nlast = Last()",
        "rd.arena_arrays(comm).__enter__(); kept.append(np.ones(50_000))",
    ],
)
def test_arrays_that_are_left_at_exit_disturb_nobody(more: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT.format(more=more)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_kernel_is_asked_whether_pages_are_the_same() -> None:
    """Without that, tensors could not be registered; no kernel since 2.6.31 lacks it."""
    assert _core.Registration.can_look()
