"""Ranks that make different calls are told so on every rank, with who called what, where."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from roundelay.communicator import ANY
from roundelay.errors import CollectiveMismatch, CommunicationError
from roundelay.reductions import Op

SOON = 20.0  # generous: it takes milliseconds
Calls = Callable[[Any], Any]

ones = np.ones
DIFFERENT: dict[str, tuple[Calls, Calls, list[str]]] = {
    "collective": (
        lambda c: c.all_reduce(ones(3)),
        lambda c: c.broadcast(ones(3)),
        ["all_reduce #1 float64[3] op=sum", "broadcast #1 float64[3] root=0"],
    ),
    "barrier": (lambda c: c.barrier(), lambda c: c.scan(ones(3)), ["barrier #1", "scan #1"]),
    "dtype": (
        lambda c: c.all_reduce(ones(3)),
        lambda c: c.all_reduce(ones(3, np.float32)),
        ["float64[3]", "float32[3]"],
    ),
    "count": (
        lambda c: c.all_reduce(ones(3)),
        lambda c: c.all_reduce(ones(4)),
        ["float64[3]", "float64[4]"],
    ),
    "count, large": (
        lambda c: c.all_reduce(ones(300_000)),
        lambda c: c.all_reduce(ones(300_001)),
        ["float64[300000]", "float64[300001]"],
    ),
    "count, large and small": (
        lambda c: c.all_reduce(ones(300_000)),
        lambda c: c.all_reduce(ones(1)),
        ["float64[300000]", "float64[1]"],
    ),
    "root": (
        lambda c: c.broadcast(ones(3), 0),
        lambda c: c.broadcast(ones(3), 1),
        ["root=0", "root=1"],
    ),
    "root of gather": (
        lambda c: c.gather(ones(3), 0),
        lambda c: c.gather(ones(3), 1),
        ["root=0", "root=1"],
    ),
    "op": (
        lambda c: c.all_reduce(ones(3), "sum"),
        lambda c: c.all_reduce(ones(3), "max"),
        ["op=sum", "op=max"],
    ),
    "algorithm": (
        lambda c: c.all_reduce(ones(3), algorithm="ring"),
        lambda c: c.all_reduce(ones(3), algorithm="tree"),
        ["(ring)", "(tree)"],
    ),
    "counts": (
        lambda c: c.reduce_scatter(ones(12), axis=0, counts=[12 // c.size] * c.size),
        lambda c: c.reduce_scatter(ones(12), axis=0, counts=[12, *[0] * (c.size - 1)]),
        ["reduce_scatter #1"],
    ),
    "axis": (
        lambda c: c.all_gather(ones(3)),
        lambda c: c.all_gather(ones(3), axis=0),
        ["all_gather #1 float64[3] (", "all_gather #1 float64[3] axis=0 ("],
    ),
    "axis of gather": (
        lambda c: c.gather(ones(3), 1),
        lambda c: c.gather(ones(3), 1, axis=0),
        ["gather #1 float64[3] root=1 (", "gather #1 float64[3] root=1 axis=0 ("],
    ),
    "axis of reduce_scatter": (
        lambda c: c.reduce_scatter(ones(c.size)),
        lambda c: c.reduce_scatter(ones(c.size), axis=0),
        ["op=sum (", "op=sum axis=0 ("],
    ),
    "axis in the background": (
        lambda c: c.start.all_to_all(ones(c.size)).wait(),
        lambda c: c.start.all_to_all(ones(c.size), axis=0).wait(),
        ["float64[1] (", "float64[1] axis=0 ("],
    ),
    "function": (
        lambda c: c.all_reduce(ones(3), Op(lambda a, b: a + b)),
        lambda c: c.all_reduce(ones(3), Op(lambda a, b: a * b)),
        ["all_reduce #1, by all_gather float64[3] op=rd.Op "],
    ),
    "function of reduce": (
        lambda c: c.reduce(ones(3), Op(np.add), 1),
        lambda c: c.reduce(ones(3), Op(np.multiply), 1),
        ["reduce #1, by gather float64[3] root=1 op=rd.Op "],
    ),
    "function of scan": (
        lambda c: c.scan(ones(3), Op(np.add)),
        lambda c: c.exscan(ones(3), Op(np.add)),
        ["exscan #1, by all_gather", " scan #1, by all_gather"],
    ),
    "function that does not commute": (
        lambda c: c.reduce_scatter(ones(c.size), Op(np.add)),
        lambda c: c.reduce_scatter(ones(c.size), Op(np.add, commutative=False)),
        ["reduce_scatter #1, by all_to_all float64[1] op=rd.Op "],
    ),
    "split": (
        lambda c: c.all_gather(ones(2, np.int64)),
        lambda c: c.split(0),
        ["all_gather #1 int64[2] (", "split #1, by all_gather int64[2] ("],
    ),
    "objects": (
        lambda c: c.gather_object(1),
        lambda c: c.all_gather_object(1),
        ["gather_object #1, by all_gather", "all_gather_object #1, by all_gather"],
    ),
    "start": (
        lambda c: c.start.all_reduce(ones(3)).wait(),
        lambda c: c.start.all_gather(ones(3)).wait(),
        ["all_reduce #1", "all_gather #1"],
    ),
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", list(DIFFERENT))
@pytest.mark.parametrize("odd", [0, 1])
def test_a_different_call_is_named_on_every_rank(
    name: str, size: int, odd: int, ranks: Any
) -> None:
    usual, other, shown = DIFFERENT[name]

    def work(comm: Any) -> str:
        start = time.monotonic()
        with pytest.raises(CollectiveMismatch) as caught:
            (other if comm.rank == odd else usual)(comm)
            # A rank that needs nothing from the others learns it with its next call.
            comm.barrier()
            comm.barrier()
        assert time.monotonic() - start < SOON
        for _ in range(3):
            again = time.monotonic()
            with pytest.raises(CommunicationError):
                comm.all_reduce(np.ones(1))
            with pytest.raises(CommunicationError):
                comm.send(np.ones(1), 0)
            with pytest.raises(CommunicationError):
                comm.start.barrier().wait()
            assert time.monotonic() - again < SOON
        return str(caught.value)

    messages = ranks(size, work)
    for message in messages:
        for text in shown:
            assert text in message
        lines = message.splitlines()[1:]
        named = sorted(int(n) for line in lines for n in re.findall(r"\d+", line.split(":")[0]))
        assert named == list(range(size))
        assert all(re.search(r"test_fault_mismatch\.py:\d+$", line) for line in lines), message


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_function_that_every_rank_makes_for_itself_is_the_same(size: int, ranks: Any) -> None:
    def work(comm: Any) -> list[float]:
        scale = comm.rank + 1.0  # what a function closes over is its own business
        makes: list[Callable[[], Op]] = [
            lambda: Op(lambda a, b: a + b, name="add"),
            lambda: Op(partial(np.add)),
            lambda: Op(lambda a, b: (a * scale + b * scale) / scale),
        ]
        return [float(comm.all_reduce(np.ones(2), make())[0]) for make in makes for _ in range(2)]

    for found in ranks(size, work):
        assert found[:4] == [float(size)] * 4


@pytest.mark.parametrize("size", [2, 4])
def test_a_mismatch_between_ranks_that_exchange_nothing_is_found(size: int, ranks: Any) -> None:
    """Only ranks other than the root differ, and each of them gets nothing from the other."""

    def work(comm: Any) -> str:
        comm.barrier()
        with pytest.raises(CollectiveMismatch) as caught:
            if comm.rank == size - 1:
                comm.reduce(np.ones(3), root=size - 1)
            else:
                comm.gather(np.ones(3), root=comm.rank)
            for _ in range(4):
                comm.all_reduce(np.ones(5))
        return str(caught.value)

    for message in ranks(size, work):
        assert "#2" in message
        assert "gather" in message


def test_source_lines_survive_several_groups(ranks: Any) -> None:
    def work(comm: Any) -> str:
        sub = comm.split(0)
        sub.barrier()
        sub.all_reduce(np.ones(2))
        with pytest.raises(CollectiveMismatch) as caught:
            if comm.rank == 0:
                first(comm)
            else:
                second(comm)
        return str(caught.value)

    for message in ranks(2, work):
        assert f"test_fault_mismatch.py:{first.__code__.co_firstlineno + 1}" in message
        assert f"test_fault_mismatch.py:{second.__code__.co_firstlineno + 1}" in message


def first(comm: Any) -> None:
    comm.all_reduce(np.ones(1))


def second(comm: Any) -> None:
    comm.all_reduce(np.ones(2))


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_closes_while_others_call_is_named_on_every_rank(size: int, ranks: Any) -> None:
    calls: dict[str, Calls] = {
        "barrier #2": lambda c: c.barrier(),
        "all_reduce #2": lambda c: c.all_reduce(np.ones(100_000)),
        "recv from rank 1, tag 3": lambda c: c.recv(np.ones(1), 1, 3),
        "send to rank 1, tag 0": lambda c: c.send(np.ones(1_000_000), 1),
        "broadcast #2": lambda c: c.start.broadcast(np.ones(1), 1).wait(),
    }
    for said, call in calls.items():

        def work(comm: Any, call: Calls = call) -> None:
            comm.barrier()
            if comm.rank != 1:
                call(comm)

        start = time.monotonic()
        for found in ranks.outcomes(size, work):
            assert found.error == "CollectiveMismatch", found.trace
            assert said in found.message
            closed = r"rank 1: closed the communicator at .*conftest\.py:\d+"
            assert re.search(closed, found.message)
        assert time.monotonic() - start < SOON


def test_waiting_for_any_when_all_others_have_closed(ranks: Any) -> None:
    def work(comm: Any) -> None:
        if comm.rank == 0:
            comm.recv(np.ones(1), ANY)

    for found in ranks.outcomes(3, work):
        assert found.error == "CollectiveMismatch", found.trace
        assert "rank 0: recv from any rank, tag 0" in found.message
        assert "ranks 1, 2: closed the communicator" in found.message


def test_calls_that_look_alike_are_told_to_differ_in_counts(ranks: Any) -> None:
    def work(comm: Any) -> None:
        comm.reduce_scatter(np.ones(3), axis=0, counts=[1, 1, 1] if comm.rank else [3, 0, 0])

    def known(comm: Any) -> None:  # of all ranks, which do not agree on what another sends
        there = [[1, 1, 1], [1, 1, 1], [3, 0, 0] if comm.rank == 0 else [1, 1, 1]]
        comm.all_to_all(np.ones(3), axis=0, counts=there)

    for body in (work, known):
        for found in ranks.outcomes(3, body):
            assert found.error == "CollectiveMismatch"
            assert "they differ in counts=" in found.message


def test_a_rank_that_raises_is_told_to_the_others(ranks: Any) -> None:
    def work(comm: Any) -> None:
        if comm.rank == 1:
            raise LookupError("no such layer")
        comm.barrier()

    found = ranks.outcomes(3, work)
    assert [one.error for one in found] == ["PeerLost", "LookupError", "PeerLost"]
    assert "Rank 1 failed: LookupError: no such layer" in found[0].message
