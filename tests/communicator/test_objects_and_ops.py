"""Python objects, reductions of one's own, and values with their places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from roundelay.communicator import ANY
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, UnsupportedReductionError
from roundelay.reductions import Located, Op

THINGS: list[Any] = [
    None,
    0,
    -(2**62),
    0.5,
    "ö" * 1000,
    b"\x00" * 100_000,
    [1, [2, []]],
    {"a": {"b": [None, True]}},
    {1: "one"},
]


def test_objects_arrive_as_they_left(ranks: Any) -> None:
    def work(comm: Any) -> None:
        for at, thing in enumerate(THINGS):
            root = at % comm.size
            mine = [thing, comm.rank, "x" * comm.rank * 1000]
            every = [[thing, rank, "x" * rank * 1000] for rank in range(comm.size)]
            assert comm.all_gather_object(mine) == every
            assert comm.gather_object(mine, root) == (every if comm.rank == root else None)
            assert comm.broadcast_object(mine if comm.rank == root else None, root) == every[root]
            parts = every if comm.rank == root else None
            assert comm.scatter_object(parts, root) == every[comm.rank]
            comm.send_object(mine, (comm.rank + 1) % comm.size)
            left = (comm.rank - 1) % comm.size
            assert comm.recv_object(left) == every[left]

    for size in (1, 3):
        ranks(size, work)


def test_arrays_travel_inside_objects(ranks: Any) -> None:
    def work(comm: Any) -> None:
        mine = {"weights": np.full((comm.rank, 3), 1.5, np.float32), "step": np.int64(7)}
        for rank, got in enumerate(comm.all_gather_object(mine)):
            assert got["weights"].shape == (rank, 3)
            assert got["weights"].dtype == np.float32
            assert got["step"] == 7

    ranks(3, work)


def test_pickle_only_when_every_side_asks(ranks: Any) -> None:
    def work(comm: Any) -> None:
        thing = {comm.rank, "a set"}
        with pytest.raises(InvalidArgumentError, match="allow_pickle"):
            comm.all_gather_object(thing)
        every = comm.all_gather_object(thing, allow_pickle=True)
        assert every == [{rank, "a set"} for rank in range(comm.size)]
        if comm.rank == 0:
            comm.send_object(thing, 1, allow_pickle=True)
        else:
            with pytest.raises(
                InvalidArgumentError, match="pickled value came where none was asked for"
            ):
                comm.recv_object(0)

    ranks(2, work)


def test_objects_from_any_rank_stay_whole(ranks: Any) -> None:
    def work(comm: Any) -> None:
        if comm.rank:
            for turn in range(200):
                comm.send_object((comm.rank, turn, bytes(3000 + turn * 75)), 0, tag=comm.rank)
            return
        came = [comm.recv_object(ANY, ANY) for _ in range(200 * (comm.size - 1))]
        for rank in range(1, comm.size):
            mine = [(turn, len(data)) for src, turn, data in came if src == rank]
            assert mine == [(turn, 3000 + turn * 75) for turn in range(200)]

    for size in (3, 4):
        ranks(size, work)


def test_an_array_is_no_object_and_the_rest_of_an_object_is_no_message(ranks: Any) -> None:
    def work(comm: Any) -> None:
        if comm.rank == 0:
            comm.send(np.arange(3), 1)
            comm.send(np.ones(2), 1)
            comm.send_object("x" * 100_000, 1, tag=4)
            comm.send(np.array([7.0]), 1, tag=5)
            return
        with pytest.raises(CollectiveMismatch, match=r"is an array, int64\[3\], which was sent by"):
            comm.recv_object(0)
        with pytest.raises(CollectiveMismatch, match=r"the message is float64\[2\]"):
            comm.recv_object(0)
        head = comm.start.recv(np.zeros(1), 0, ANY)  # not asked for by recv_object
        with pytest.raises(CollectiveMismatch, match=r"the message is int64\[3\]"):
            head.wait()
        assert comm.recv(np.zeros(1), 0, ANY) == 7

    ranks(2, work)


def compose(f: Any, g: Any) -> Any:
    """Compose x -> a x + b, packed as a + bi: associative, not commutative."""
    return f.real * g.real + 1j * (f.imag * g.real + g.imag)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_reductions_of_ones_own_fold_in_rank_order(size: int, ranks: Any) -> None:
    def work(comm: Any) -> None:
        op = Op(compose, commutative=False)
        for numel in (0, 1, 7, 9_000):
            every = [np.full(numel, 2 + r + 1j * (r + 1)) for r in range(comm.size)]
            upto = [every[0]]
            for other in every[1:]:
                upto.append(compose(upto[-1], other))
            x = every[comm.rank].copy()
            assert comm.all_reduce(x, op) is x
            assert (x == upto[-1]).all()
            found = comm.reduce(every[comm.rank].copy(), op, comm.size - 1)
            assert (found is None) == (comm.rank != comm.size - 1)
            assert found is None or (found == upto[-1]).all()
            assert (comm.scan(every[comm.rank].copy(), op) == upto[comm.rank]).all()
            before = comm.exscan(every[comm.rank].copy(), op)
            assert (before == (upto[comm.rank - 1] if comm.rank else every[0])).all()
            rows = np.tile(every[comm.rank], (comm.size, 1))
            assert (comm.reduce_scatter(rows, op) == upto[-1]).all()

    ranks(size, work)


def test_an_op_that_changes_the_shape_is_refused(threads: Any) -> None:
    def work(comm: Any) -> None:
        with pytest.raises(UnsupportedReductionError, match="must keep shape and dtype"):
            comm.all_reduce(np.ones(2), Op(np.append))

    threads(2, work)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float32", "float64", "bool"])
def test_located_values_keep_the_lowest_place(dtype: str, ranks: Any) -> None:
    def work(comm: Any) -> None:
        rng = np.random.default_rng(1)
        every = rng.integers(0, 2 if dtype == "bool" else 5, (comm.size, 501)).astype(dtype)
        for op, best in (("maxloc", np.max), ("minloc", np.min)):
            due = best(every, axis=0)
            found = comm.all_reduce(every[comm.rank].copy(), op)
            assert (found.values == due).all()
            assert (found.locations == (every == due).argmax(axis=0)).all()
            places = np.full(501, 100 - comm.rank)
            found = comm.all_reduce(Located(every[comm.rank].copy(), places), op)
            last = comm.size - 1 - (every == due)[::-1].argmax(axis=0)
            assert (found.locations == 100 - last).all()

    ranks(3, work)


def test_located_is_refused_where_it_has_no_meaning(threads: Any) -> None:
    def work(comm: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="maxloc"):
            comm.all_reduce(Located(np.ones(1), np.ones(1)))

    threads(1, work)
