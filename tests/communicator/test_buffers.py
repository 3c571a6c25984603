"""Every kind of buffer gives the same numbers, comes back as what it was, or is refused by name."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import roundelay as rd
from roundelay.communicator.memory import overlap
from roundelay.errors import InvalidArgumentError, UnsupportedReductionError

SIZES = (1, 2, 3, 4)


def lay_out(kind: str, values: Any) -> Any:
    """Return these values, two-dimensional, in memory of an unusual shape."""
    rows, columns = values.shape
    if kind == "strided":
        base = np.zeros((rows * 2, columns * 3), values.dtype)
        made = base[::2, ::3]
    elif kind == "transposed":
        made = np.zeros((columns, rows), values.dtype).T
    elif kind == "backwards":
        made = np.zeros((rows, columns), values.dtype)[::-1, ::-1]
    elif kind == "fortran":
        made = np.zeros((rows, columns), values.dtype, order="F")
    elif kind == "misaligned":
        raw = np.zeros(values.nbytes + 1, np.uint8)[1:]
        made = raw.view(values.dtype).reshape(rows, columns)
    else:
        made = np.zeros((rows, columns), values.dtype)
    made[...] = values
    return made


LAYOUTS = ("plain", "strided", "transposed", "backwards", "fortran", "misaligned")
COUNTED = 40_000  # bytes enough for the path of large messages


def brings(rank: int, rows: int, columns: int) -> Any:
    return (np.arange(rows * columns).reshape(rows, columns) * 7 + rank) % 1000 * 1.0


@pytest.mark.parametrize("size", SIZES)
def test_every_layout_gives_the_same_numbers(size: int, ranks: Any) -> None:
    def work(comm: Any) -> list[str]:
        wrong = []

        def expect(what: str, got: Any, due: Any) -> None:
            if got.shape != due.shape or not (got == due).all():
                wrong.append(f"{what} on rank {comm.rank}: {got} is not {due}")

        for rows, columns in ((0, 3), (comm.size, 1), (comm.size * 2, 5), (comm.size * 40, 200)):
            every = [brings(rank, rows, columns) for rank in range(comm.size)]
            total = np.sum(every, axis=0)
            for layout in LAYOUTS:
                x = lay_out(layout, every[comm.rank])
                assert comm.all_reduce(x) is x
                expect(f"all_reduce {layout}", x, total)

                x, out = lay_out(layout, every[comm.rank]), lay_out(layout, total * 0)
                assert comm.all_reduce(x, out=out) is out
                expect(f"all_reduce out= {layout}", out, total)
                expect(f"all_reduce leaves x alone {layout}", x, every[comm.rank])

                comm.broadcast(x, comm.size - 1)
                expect(f"broadcast {layout}", x, every[-1])

                x = lay_out(layout, every[comm.rank])
                expect(f"all_gather {layout}", comm.all_gather(x), np.stack(every))
                joined = lay_out(layout, np.concatenate(every) * 0)
                assert comm.all_gather(x, axis=0, out=joined) is joined
                expect(f"all_gather axis=0 {layout}", joined, np.concatenate(every))

                share = comm.reduce_scatter(x, axis=0)
                due = np.split(total, comm.size)[comm.rank]
                expect(f"reduce_scatter axis=0 {layout}", share, due)
                swapped = comm.all_to_all(x, axis=0)
                parts = [np.split(one, comm.size)[comm.rank] for one in every]
                expect(f"all_to_all axis=0 {layout}", swapped, np.concatenate(parts))
                comm.all_to_all(x, axis=0, out=x)
                expect(f"all_to_all onto itself {layout}", x, swapped)
        return wrong

    assert ranks(size, work) == [[]] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("arena", [False, True])
def test_a_rank_may_bring_its_own_block(size: int, ranks: Any, *, arena: bool) -> None:
    """x is row r of out, or out is row r of x: nothing else lies there."""

    def work(comm: Any) -> None:
        for count in (1, 5, 20_000):
            every = np.arange(comm.size * count).reshape(comm.size, count) * 1.0
            memory = comm.empty((comm.size, count)) if arena else np.empty((comm.size, count))
            for calls in (comm, comm.start):
                memory[...] = -1
                memory[comm.rank] = every[comm.rank]
                made = calls.all_gather(memory[comm.rank], out=memory)
                assert ((made if calls is comm else made.wait()) == every).all()
                memory *= comm.rank + 1
                made = calls.reduce_scatter(memory, out=memory[comm.rank])
                shares = every[comm.rank] * (comm.size * (comm.size + 1) / 2)
                assert ((made if calls is comm else made.wait()) == shares).all()
                assert (memory[comm.rank] == shares).all()
            if comm.size > 1:
                with pytest.raises(InvalidArgumentError, match="overlaps x in part"):
                    comm.all_gather(memory[comm.rank - 1], out=memory)
                comm.barrier()

    ranks(size, work)


@pytest.mark.parametrize("size", SIZES)
def test_scalars_and_stacks(size: int, ranks: Any) -> None:
    def work(comm: Any) -> None:
        x = np.array(comm.rank + 1.0)
        assert comm.all_reduce(x) is x
        assert x.shape == ()
        assert x == comm.size * (comm.size + 1) / 2
        assert comm.all_gather(np.array(comm.rank)).tolist() == list(range(comm.size))
        row = comm.scatter(np.arange(comm.size) if comm.rank == 0 else None)
        assert (row.shape, int(row)) == ((), comm.rank)
        cube = comm.gather(np.full((2, 3), comm.rank), comm.size - 1)
        assert (cube is None) == (comm.rank != comm.size - 1)
        if cube is not None:
            assert cube.shape == (comm.size, 2, 3)
            assert (cube == np.arange(comm.size)[:, None, None]).all()
        out = np.zeros((3, 4))
        whole = np.ones((comm.size, 3, 4)) * (comm.rank + 1)
        assert comm.reduce_scatter(whole, "max", out=out) is out
        assert (out == comm.size).all()
        turned = np.arange(comm.size) + comm.size * comm.rank
        assert comm.all_to_all(turned, out=turned) is turned
        assert turned.tolist() == [comm.rank + comm.size * rank for rank in range(comm.size)]
        for call in (comm.all_reduce, comm.reduce, comm.scan, comm.exscan):
            mine, beside = np.full(5, comm.rank + 1.0), np.full(5, -1.0)
            call(mine, out=beside)
            again = mine.copy()
            call(again)
            written = beside if call != comm.reduce or comm.rank == 0 else again
            if call != comm.exscan or comm.rank > 0:
                assert (written == again).all()
            assert (mine == comm.rank + 1).all()

    ranks(size, work)


@pytest.mark.parametrize("size", SIZES)
def test_uneven_counts(size: int, ranks: Any) -> None:
    def work(comm: Any) -> None:
        for scale in (1, 3, 20_000):
            counts = [(rank * 2) % 3 * scale for rank in range(comm.size)]
            mine = np.full((counts[comm.rank], 2), comm.rank, np.int32)
            due = np.concatenate([np.full((n, 2), rank) for rank, n in enumerate(counts)])
            assert (comm.all_gather(mine, axis=0, counts=counts) == due).all()
            for root in range(comm.size):
                found = comm.gather(mine, root, axis=0, counts=np.array(counts))
                assert (found is None) == (root != comm.rank)
                assert found is None or (found == due).all()
            whole = np.arange(sum(counts) * 2).reshape(-1, 2) + comm.rank
            share = comm.reduce_scatter(whole, axis=0, counts=counts)
            start = sum(counts[: comm.rank])
            total = np.arange(sum(counts) * 2).reshape(-1, 2) * comm.size
            total += sum(range(comm.size))
            assert (share == total[start : start + counts[comm.rank]]).all()
            table = [
                [(src + dst) % 3 * scale for dst in range(comm.size)] for src in range(comm.size)
            ]
            sent = np.repeat(np.arange(comm.size), table[comm.rank]) + 100 * comm.rank
            parts = [
                np.full(table[src][comm.rank], comm.rank + 100 * src) for src in range(comm.size)
            ]
            known: list[Any] = [table[comm.rank], table]  # its own counts; those of all ranks
            for told in known:
                got = comm.all_to_all(sent, axis=0, counts=told)
                assert (got == np.concatenate(parts)).all()

    ranks(size, work)


def test_anything_with_the_buffer_protocol_or_dlpack(ranks: Any) -> None:
    class Capsule:
        """Speaks DLPack and nothing else."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __dlpack__(self, **options: Any) -> Any:
            return self.inner.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.inner.__dlpack_device__()

    def work(comm: Any) -> None:
        def total(x: Any) -> Any:
            given = comm.all_reduce(x)
            assert given is x
            return given

        assert total(bytearray([1, 2])) == bytearray([comm.size, 2 * comm.size])
        assert total(array.array("d", [0.5])) == array.array("d", [0.5 * comm.size])
        assert total(memoryview(bytearray(3))).tolist() == [0, 0, 0]
        inner = np.ones(4, np.float32)
        total(Capsule(inner))
        assert (inner == comm.size).all()
        assert comm.all_gather(b"ab").tobytes() == b"ab" * comm.size
        x = np.full(5, 1.5, ml_dtypes.bfloat16)
        total(x)
        assert x.dtype == ml_dtypes.bfloat16
        assert (x == 1.5 * comm.size).all()

    ranks(3, work)


REFUSED: list[tuple[str, Callable[[Any], Any], str]] = [
    ("read-only", lambda c: c.all_reduce(np.broadcast_to(1.0, 3)), "read-only"),
    ("read-only bytes", lambda c: c.all_reduce(b"abc"), "read-only"),
    ("read-only out", lambda c: c.all_gather(np.ones(1), out=frozen((1, 1))), "read-only"),
    ("read-only recv", lambda c: c.recv(frozen(3), 0), "read-only"),
    ("list", lambda c: c.all_reduce([1, 2]), "not list.*all_reduce_object|not list"),
    ("None", lambda c: c.broadcast(None), "not NoneType"),
    ("number", lambda c: c.all_reduce(3.0), "not float"),
    ("text dtype", lambda c: c.all_reduce(np.array(["a"])), "dtype <U1"),
    ("object dtype", lambda c: c.all_reduce(np.array([{}])), "dtype object"),
    ("time dtype", lambda c: c.all_reduce(np.array(["2020"], "M8[s]")), "dtype datetime64"),
    ("records", lambda c: c.all_reduce(np.zeros(2, "i4,f4")), "does not take dtype"),
    ("byte order", lambda c: c.all_reduce(np.zeros(2, ">f8")), "dtype >f8"),
    ("long double", lambda c: c.all_reduce(np.zeros(2, np.longdouble)), "dtype float128"),
    ("op", lambda c: c.all_reduce(np.ones(2), "summ"), "Did you mean 'sum'"),
    ("algorithm", lambda c: c.all_reduce(np.ones(2), algorithm="rink"), "Did you mean 'ring'"),
    ("algorithm of another", lambda c: c.broadcast(np.ones(2), algorithm="ring"), "has no 'ring'"),
    ("root", lambda c: c.broadcast(np.ones(2), 7), "no root 7"),
    ("negative root", lambda c: c.reduce(np.ones(2), root=-1), "no root -1"),
    ("root by float", lambda c: c.gather(np.ones(2), 0.0), "no root 0.0"),
    ("out of another shape", lambda c: c.all_reduce(np.ones(2), out=np.ones(3)), r"float64\[3\]"),
    ("out of another dtype", lambda c: c.all_reduce(np.ones(2), out=np.ones(2, "f4")), "float32"),
    ("axis", lambda c: c.all_gather(np.ones(2), axis=1), "axis=None .* or axis=0"),
    ("axis of a scalar", lambda c: c.all_gather(np.array(1), axis=0), "at least one dimension"),
    ("counts without axis", lambda c: c.all_gather(np.ones(1), counts=[1]), "axis=0"),
    ("too many counts", lambda c: c.all_gather(np.ones(1), axis=0, counts=[1, 1]), "1 whole"),
    ("negative counts", lambda c: c.all_gather(np.ones(1), axis=0, counts=[-1]), "whole numbers"),
    ("a list of two", lambda c: c.all_to_all(np.ones(2), axis=0, counts=[[1, 1]]), "1 whole"),
    ("one of two", lambda c: c.all_to_all(np.ones(2), axis=0, counts=[[1], [1]]), "1 whole"),
    ("other rows", lambda c: c.all_to_all(np.ones(2), axis=0, counts=[[1]]), "do not add up"),
    ("wrong counts", lambda c: c.all_gather(np.ones(1), axis=0, counts=[2]), "brings 1 rows"),
    ("rows", lambda c: c.reduce_scatter(np.ones((2, 2))), "equal to the number of ranks"),
    ("rows of scatter", lambda c: c.scatter(np.ones((3, 2))), r"shape \(1, …\)"),
    ("dst", lambda c: c.send(np.ones(1), 5), "no rank 5"),
    ("tag", lambda c: c.send(np.ones(1), 0, -4), "not -4"),
    ("color", lambda c: c.split(-3), "not -3"),
    ("group", lambda c: c.group([0, 0]), "different ranks"),
    ("nobody", lambda c: c.group([]), "at least one"),
    ("timeout", lambda c: setattr(c, "timeout", -1), "positive number"),
    ("timeout 0", lambda c: setattr(c, "timeout", 0), "positive number"),
    ("timeout NaN", lambda c: setattr(c, "timeout", float("nan")), "positive number"),
    ("object", lambda c: c.all_gather_object(object()), "allow_pickle=True"),
]


def frozen(shape: Any) -> Any:
    made = np.ones(shape)
    made.flags.writeable = False
    return made


#: Calls that write their `x`, and whether they take out= instead.
IN_PLACE: list[tuple[str, Callable[[Any, Any], Any], bool]] = [
    ("all_reduce", lambda c, x: c.all_reduce(x), True),
    ("reduce", lambda c, x: c.reduce(x, root=c.rank), True),
    ("scan", lambda c, x: c.scan(x), True),
    ("exscan", lambda c, x: c.exscan(x), True),
    ("of one's own", lambda c, x: c.all_reduce(x, rd.Op(np.add)), True),
    ("broadcast", lambda c, x: c.broadcast(x, root=1 - c.rank), False),
    ("recv", lambda c, x: c.recv(x, 1 - c.rank), False),
    ("sendrecv", lambda c, x: c.sendrecv(np.ones(3), 1 - c.rank, x, 1 - c.rank), False),
    ("given out", lambda c, x: c.all_reduce(np.ones(3), out=x), False),
    ("gathered out", lambda c, _: c.all_gather(np.ones(3), out=frozen((2, 3))), False),
]


@pytest.mark.parametrize("kind", ["array", "bytes"])
def test_the_way_out_of_read_only_memory_is_one_that_the_call_has(kind: str, threads: Any) -> None:
    def work(comm: Any) -> list[str]:
        wrong = []
        for name, call, takes_out in IN_PLACE:
            x: Any = (
                frozen(3)
                if kind == "array"
                else memoryview(array.array("d", [1, 2, 3])).toreadonly()
            )
            with pytest.raises(InvalidArgumentError, match="read-only") as caught:
                call(comm, x)
            due = "Pass out= or a copy." if takes_out else "Pass a copy."
            if not str(caught.value).endswith(due):
                wrong.append(f"{name}: {caught.value}")
            comm.barrier()
        return wrong

    assert threads(2, work) == [[], []]


def test_what_is_refused_is_named_and_breaks_nothing(threads: Any) -> None:
    def work(comm: Any) -> list[str]:
        missed = []
        for name, call, message in REFUSED:
            try:
                with pytest.raises(InvalidArgumentError, match=message):
                    call(comm)
            except (BaseException, pytest.fail.Exception) as error:  # noqa: BLE001 - collected
                missed.append(f"{name}: {type(error).__name__}: {error}")
            assert comm.all_reduce(np.ones(1)) == 1
        return missed

    assert threads(1, work) == [[]]


@pytest.mark.parametrize("op", ["avg", "band", "min"])
def test_reductions_without_meaning_are_refused(op: str, threads: Any) -> None:
    def work(comm: Any) -> None:
        dtype = {"avg": "int32", "band": "float32", "min": "complex64"}[op]
        with pytest.raises(UnsupportedReductionError, match=f"{op} takes .* not {dtype}"):
            comm.all_reduce(np.ones(2, dtype), op)

    threads(2, work)


@pytest.mark.parametrize(
    ("call", "pick"),
    [
        ("all_reduce", lambda a: (a[:4], a[2:6])),
        ("all_gather", lambda a: (a[1:3], a[:4].reshape(2, 2))),
        ("reduce_scatter", lambda a: (a[:4].reshape(2, 2), a[1:3])),
        ("scan", lambda a: (a[:4], a[1:5])),
    ],
)
def test_overlap_is_refused(call: str, pick: Any, threads: Any) -> None:
    def work(comm: Any) -> None:
        x, out = pick(np.zeros(8))
        with pytest.raises(InvalidArgumentError, match="overlaps"):
            getattr(comm, call)(x, out=out)

    threads(2, work)


#: Pairs of views of one row that have no element in common, though each begins inside the other.
INTERLEAVED: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "even and odd": lambda a: (a[::2], a[1::2]),
    "odd and even": lambda a: (a[1::2], a[::2]),
    "backwards": lambda a: (a[::2], a[::-2]),
    "columns": lambda a: (a.reshape(-1, 4)[:, :2], a.reshape(-1, 4)[:, 2:]),
    "one in the other's gaps": lambda a: (a[1:3], a[::3][:2]),
}


@pytest.mark.parametrize("pick", INTERLEAVED.values(), ids=INTERLEAVED)
def test_memory_between_the_elements_is_memory_of_its_own(pick: Any, ranks: Any) -> None:
    def work(comm: Any) -> None:
        for numel in (8, 40_000):
            for call in (comm.all_reduce, comm.scan):
                x, out = pick(np.arange(numel, dtype=float))
                times = comm.size if call == comm.all_reduce else comm.rank + 1
                before, due = x.copy(), x * times
                assert not np.shares_memory(x, out)
                assert call(x, out=out) is out
                assert (out == due).all()
                assert (x == before).all()

    ranks(2, work)


def test_overlap_is_what_numpy_finds_by_looking_at_every_element() -> None:
    """Of views with any beginning, stride and length, on the host and on a device."""
    row = np.zeros(12)
    views = [
        row[first::step][:numel]
        for first in (0, 1, 5, 11) for step in (1, 2, 3, -1, -2) for numel in (0, 1, 2, 4)
    ] + [row.reshape(3, 4)[:, :2], row.reshape(3, 4)[:, 2:], row.reshape(4, 3).T]  # fmt: skip
    for one in views:
        for other in views:
            assert overlap(one, other) == np.shares_memory(one, other), (one, other)
        assert not overlap(one, np.zeros(12))
