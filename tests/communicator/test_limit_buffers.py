"""Buffers of every odd kind: the right numbers, or refused by name before anybody waits."""

from __future__ import annotations

import array
import ctypes
import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import roundelay as rd
from roundelay.engines import run_schedule
from roundelay.errors import InvalidArgumentError, NoRoomError, RoundelayError
from roundelay.schedule import Schedule

strided = np.lib.stride_tricks.as_strided


class OnDevice:
    """Speaks DLPack of memory that is not the host's; to take it would be to read nonsense."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __dlpack_device__(self) -> Any:
        return self.kind

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("nobody may ask for it")


class Mute:
    """Speaks DLPack, and lies."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **_: Any) -> int:
        return 3


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_int)]


def released() -> memoryview:
    view = memoryview(bytearray(8))
    view.release()
    return view


#: What no call takes as a buffer.
NEVER: dict[str, Callable[[], Any]] = {
    "masked": lambda: np.ma.array([1.0, 2.0], mask=[False, True]),
    "masked integers": lambda: np.ma.arange(3),
    "objects": lambda: np.array([{}, 1]),
    "text": lambda: np.array(["a"]),
    "bytes": lambda: np.array([b"ab"]),
    "times": lambda: np.zeros(2, "M8[s]"),
    "spans": lambda: np.zeros(2, "m8[ms]"),
    "records": lambda: np.zeros(2, "i4,f4"),
    "pairs": lambda: np.zeros(2, [("value", "f8"), ("location", "i8")]),
    "void": lambda: np.zeros(2, "V8"),
    "byte order": lambda: np.zeros(2, ">f8"),
    "byte order of integers": lambda: np.zeros(2, ">i4"),
    "long double": lambda: np.zeros(2, np.longdouble),
    "long complex": lambda: np.zeros(2, np.clongdouble),
    "float8": lambda: np.zeros(2, ml_dtypes.float8_e4m3fn),
    "released view": released,
    "pointers": lambda: memoryview(bytearray(8)).cast("P"),
    "structures": Pair * 2,
    "unicode array": lambda: array.array("u", "ab"),
    "CUDA": lambda: OnDevice((2, 0)),
    "unknown device": lambda: OnDevice((99, 0)),
    "no device": lambda: OnDevice(None),
    "a lying DLPack": Mute,
    "list": lambda: [1.0],
    "None": lambda: None,
    "number": lambda: 1.0,
    "class": lambda: np.ndarray,
    "text itself": lambda: "abc",
}
#: What is read well enough, but must not be written.
NOT_WRITTEN: dict[str, Callable[[], Any]] = {
    "read-only": lambda: np.broadcast_to(1.0, 4),
    "bytes": lambda: b"abcd",
    "one place": lambda: strided(np.ones(4), (4,), (0,)),
    "windows": lambda: strided(np.ones(8), (4, 4), (8, 8)),
    "windows backwards": lambda: strided(np.ones(8)[::-1], (4, 4), (-8, -8)),
    "a broadcast row": lambda: strided(np.ones(4), (3, 4), (0, 8)),
}
INTO: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda c, x: c.all_reduce(x),
    "all_reduce out": lambda c, x: c.all_reduce(np.ones_like(x), out=x),
    "reduce": lambda c, x: c.reduce(x),
    "scan": lambda c, x: c.scan(x),
    "exscan": lambda c, x: c.exscan(x),
    "own op": lambda c, x: c.all_reduce(x, rd.Op(np.add)),
    "all_gather out": lambda c, x: c.all_gather(np.ones_like(x)[0], out=x, axis=None),
    "recv": lambda c, x: c.recv(x, 0),
    "start.all_reduce": lambda c, x: c.start.all_reduce(x).wait(),
    "start.recv": lambda c, x: c.start.recv(x, 0).wait(),
}
OUT_OF: dict[str, Callable[[Any, Any], Any]] = {
    "broadcast": lambda c, x: c.broadcast(x),
    "all_gather": lambda c, x: c.all_gather(x),
    "gather": lambda c, x: c.gather(x),
    "scatter": lambda c, x: c.scatter(x),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x),
    "all_to_all": lambda c, x: c.all_to_all(x, axis=0),
    "send": lambda c, x: c.send(x, 0),
    "located": lambda c, x: c.all_reduce(x, "maxloc"),
    "counts": lambda c, x: c.all_gather(x, axis=0, counts=[2]),
    "out": lambda c, x: c.all_reduce(np.ones(2), out=x),
}


def tried(call: Callable[[Any, Any], Any], comm: Any, make: Callable[[], Any]) -> str:
    """Return how a call ended: what was refused in our words is right."""
    try:
        call(comm, make())
    except InvalidArgumentError as error:
        return "" if len(str(error)) < 400 else f"a message of {len(str(error))}"
    except Exception as error:  # noqa: BLE001 - told
        return f"{type(error).__name__}: {error}"
    return "was taken"


def test_what_is_no_buffer_is_refused_by_every_call(threads: Any) -> None:
    def work(comm: Any) -> list[str]:
        found = [
            f"{name} {kind}: {told}"
            for name, call in (INTO | OUT_OF).items()
            for kind, make in NEVER.items()
            if "out" not in name or (name == "out" and kind != "None")
            if (told := tried(call, comm, make))
        ]
        assert comm.all_reduce(np.ones(1)) == 1
        return found

    assert threads(1, work) == [[]]


def test_what_can_not_be_written_is_no_result(threads: Any) -> None:
    def work(comm: Any) -> list[str]:
        return [
            f"{name} {kind}: {told}"
            for name, call in INTO.items()
            for kind, make in NOT_WRITTEN.items()
            if not (kind == "bytes" and ("out" in name or "own" in name))
            if (told := tried(call, comm, make))
        ]

    assert threads(1, work) == [[]]


def test_elements_in_one_place_are_read_like_others(ranks: Any) -> None:
    def work(comm: Any) -> None:
        for make in NOT_WRITTEN.values():
            x = np.asarray(memoryview(make()))
            assert (comm.all_gather(x) == np.stack([x] * comm.size)).all()
            assert (comm.all_reduce(x, out=np.empty(x.shape, x.dtype)) == x * comm.size).all()

    ranks(3, work)


@pytest.mark.parametrize("engine", ["reference", "threads"])
def test_engines_refuse_what_has_no_dtype_here(engine: str) -> None:
    broadcast = rd.algorithms.algorithms.load("broadcast_direct").schedule(2)
    arrays = {name: make for name, make in NEVER.items() if isinstance(make(), np.ndarray)}
    for name, make in arrays.items():
        if name.startswith("masked"):
            continue
        with pytest.raises(InvalidArgumentError, match=r"does not take|takes the byte order"):
            run_schedule(broadcast, [np.asarray(make()), None], engine)


SHAPES: list[tuple[Any, Any, type[Exception]]] = [
    (1 << 60, "f8", NoRoomError),
    ((1 << 40, 1 << 40), "u1", NoRoomError),
    (-1, "f8", InvalidArgumentError),
    ((2, -1), "f8", InvalidArgumentError),
    ((0, 1 << 62, 1 << 62), "u1", InvalidArgumentError),
    ((1,) * 65, "f8", InvalidArgumentError),
    (3, object, InvalidArgumentError),
    (3, "no dtype", InvalidArgumentError),
    (3, "S0", InvalidArgumentError),
    (3, "(2,)i4", InvalidArgumentError),
    (3, [("a", object)], InvalidArgumentError),
    (3, 7, InvalidArgumentError),
    ("3", "f8", InvalidArgumentError),
    (None, "f8", InvalidArgumentError),
    ({3}, "f8", InvalidArgumentError),
]


def test_memory_that_can_not_be_is_refused_on_every_rank(ranks: Any) -> None:
    def work(comm: Any) -> None:
        for shape, dtype, kind in SHAPES:
            with pytest.raises(kind, match="empty"):
                comm.empty(shape, dtype)
        endless = np.broadcast_to(1.0, 2**45)
        for call in (comm.send, comm.start.send):
            with pytest.raises(NoRoomError):
                call(endless, 0)
        value: Any
        for value in ("a", None, float("nan"), 0, -1, True, [1], 1j, np.array([1.0, 2.0])):
            with pytest.raises(InvalidArgumentError, match="timeout is a positive number"):
                comm.timeout = value
        for value in (float("inf"), 10**400, np.float32(30), np.int64(30), 30):
            comm.timeout = value
            assert comm.timeout > 29
        for value in (7, 7.0, ["ring"], np.array(["ring", "a"]), b"ring"):
            with pytest.raises(InvalidArgumentError, match="algorithm is a name"):
                comm.all_reduce(np.ones(2), algorithm=value)
            with pytest.raises(InvalidArgumentError, match="op is the name"):
                comm.scan(np.ones(2), value)
        assert comm.all_reduce(comm.empty(3) + 1).tolist() == [comm.size] * 3

    ranks(3, work)


def test_who_passes_nonsense_alone_does_not_leave_the_others_waiting(ranks: Any) -> None:
    def work(comm: Any) -> None:
        comm.broadcast(np.ones(2), root=1.5 if comm.rank == 1 else 1)

    found = ranks.outcomes(3, work)
    assert [one.error for one in found] == ["PeerLost", "InvalidArgumentError", "PeerLost"]


NONSENSE: tuple[Any, Any] = ("?!", None)
JUNK: list[Callable[[], Any]] = [
    *NEVER.values(), *NOT_WRITTEN.values(),
    lambda: np.ones(2), lambda: np.ones((1, 2)), lambda: np.array(3), lambda: np.ones(0),
    lambda: np.ones((0, 3), "c8"), lambda: np.ones((2, 2), order="F"), lambda: np.ones(4)[::-1],
    lambda: np.zeros(3, ml_dtypes.bfloat16), lambda: np.zeros(2, bool), lambda: bytearray(4),
    lambda: 0, lambda: 1, lambda: -1, lambda: 1 << 70, lambda: np.int8(0), lambda: True,
    lambda: "sum", lambda: "avg", lambda: "maxloc", lambda: "ring", lambda: rd.ANY,
    lambda: rd.Op(np.add), lambda: [0], lambda: [1], lambda: (0,), dict, object,
    lambda: rd.Located(np.ones(2), np.arange(2)), lambda: rd.Located(*NONSENSE),
    lambda: float("nan"), lambda: (1 << 40, 1 << 40), lambda: b"", lambda: Schedule,
]  # fmt: skip
CALLS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("op", "out", "algorithm"), "reduce": ("op", "root", "out", "algorithm"),
    "broadcast": ("root", "algorithm"), "all_gather": ("out", "axis", "counts", "algorithm"),
    "gather": ("root", "out", "axis", "counts", "algorithm"), "scatter": ("root", "out"),
    "reduce_scatter": ("op", "out", "axis", "counts"), "all_to_all": ("out", "axis", "counts"),
    "scan": ("op", "out"), "exscan": ("op", "out"), "barrier": ("algorithm",),
    "split": ("key",), "group": (), "empty": ("dtype",), "broadcast_object": ("root",),
    "gather_object": ("root",), "scatter_object": ("root",), "send": ("dst", "tag"),
    "send_object": ("dst", "tag"),
}  # fmt: skip
NEEDED = {"dst"}
IN_BACKGROUND = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter",
                 "scan", "exscan", "barrier")  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_junk_in_every_argument_gives_results_or_our_errors(seed: int, threads: Any) -> None:
    """Whatever is passed where: nothing raw, nothing that hangs, and the group goes on."""

    def work(comm: Any) -> list[str]:
        rng, wrong = random.Random(seed), []
        for _ in range(400):
            name = rng.choice(list(CALLS))
            options = {key: rng.choice(JUNK)() for key in CALLS[name]
                       if key in NEEDED or rng.random() < 0.4}  # fmt: skip
            first = [] if name == "barrier" else [rng.choice(JUNK)()]
            started = rng.random() < 0.2 and name in IN_BACKGROUND
            try:
                made = getattr(comm.start if started else comm, name)(*first, **options)
                if started:
                    made.wait()
            except RoundelayError:
                continue
            except Exception as error:  # noqa: BLE001 - collected
                shown = [type(one).__name__ for one in first]
                wrong.append(f"{name}({shown}, {options}): {type(error).__name__}: {error}")
        assert comm.all_reduce(np.ones(1)) == 1
        return wrong

    assert threads(1, work) == [[]]
