"""Calls in the background keep their order, really progress, and never lose an error."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from roundelay.errors import CommunicationError, InvalidArgumentError
from roundelay.reductions import Op

SIZES = (1, 2, 3, 4)


@pytest.mark.parametrize("size", SIZES)
def test_every_call_in_the_background_equals_the_call_at_once(size: int, ranks: Any) -> None:
    def work(comm: Any) -> None:
        for numel in (0, 3, 50_000):
            one = np.arange(numel * 1.0) + comm.rank
            rows = np.arange(numel * comm.size * 1.0).reshape(comm.size, numel) + comm.rank
            last = comm.size - 1
            calls: list[tuple[str, Any, dict[str, Any]]] = [
                ("all_reduce", one, {"op": "max"}),
                ("reduce", one, {"root": last}),
                ("broadcast", one, {"root": last}),
                ("all_gather", one, {}),
                ("gather", one, {"root": last, "axis": 0}),
                ("reduce_scatter", rows, {}),
                ("all_to_all", rows, {}),
                ("scan", one, {}),
                ("exscan", one, {"op": "min"}),
                ("barrier", None, {}),
            ]
            handles, due = [], []
            for name, x, options in calls:
                arguments = [] if x is None else [x.copy()]
                handles.append(getattr(comm.start, name)(*arguments, **options))
            for name, x, options in calls:
                arguments = [] if x is None else [x.copy()]
                due.append(getattr(comm, name)(*arguments, **options))
            out = np.zeros(numel)
            handles.append(comm.start.scatter(rows if comm.rank == 0 else None, out=out))
            due.append(comm.scatter(rows if comm.rank == 0 else None))
            for handle, wanted in reversed(list(zip(handles, due, strict=True))):
                got = handle.wait()
                assert handle.done()
                assert handle.wait() is got
                assert (got is None) == (wanted is None)
                assert got is None or np.array_equal(got, wanted)

    ranks(size, work)


@pytest.mark.parametrize("size", SIZES)
def test_many_in_flight_in_any_mix(size: int, ranks: Any) -> None:
    """Blocking calls and background ones run in the order they were made on every rank."""

    def work(comm: Any) -> None:
        same = random.Random(5)
        own = random.Random(comm.rank)
        pending: list[tuple[Any, float]] = []
        total = comm.size * (comm.size + 1) / 2
        for turn in range(200):
            numel = same.choice([1, 10, 5_000, 60_000])
            x = np.full(numel, comm.rank + 1.0 + turn)
            due = total + turn * comm.size
            if same.random() < 0.6:
                pending.append((comm.start.all_reduce(x), due))
            else:
                assert (comm.all_reduce(x) == due).all()
            while pending and own.random() < 0.5:
                handle, wanted = pending.pop(own.randrange(len(pending)))
                assert (handle.wait() == wanted).all()
        for handle, wanted in pending:
            assert (handle.wait() == wanted).all()

    ranks(size, work)


def test_two_communicators_started_in_different_orders(ranks: Any) -> None:
    def work(comm: Any) -> None:
        other = comm.split(0, -comm.rank)
        for _ in range(20):
            pair = [comm, other] if comm.rank % 2 else [other, comm]
            handles = [one.start.all_reduce(np.full(30_000, 1.0)) for one in pair]
            for handle in handles if comm.rank % 3 else reversed(handles):
                assert (handle.wait() == comm.size).all()

    ranks(4, work)


def test_it_progresses_while_nobody_waits(ranks: Any) -> None:
    def work(comm: Any) -> None:
        handle = comm.start.all_reduce(np.ones(200_000))
        limit = time.monotonic() + 20
        while not handle.done():
            assert time.monotonic() < limit, "nothing moves in the background"
            time.sleep(0.005)
        assert (handle.wait() == comm.size).all()

    ranks(3, work)


def test_buffers_outlive_their_handles(ranks: Any) -> None:
    def work(comm: Any) -> None:
        out = comm.empty(1)
        for turn in range(10):
            comm.start.all_reduce(np.full(100_000, float(turn)))
            comm.start.send(np.full(100_000, float(turn)), (comm.rank + 1) % comm.size)
            gc.collect()
            np.full(100_000, -1.0)  # takes freed memory, if any was
        for turn in range(10):
            got = comm.recv(np.zeros(100_000), (comm.rank - 1) % comm.size)
            assert (got == turn).all()
        comm.barrier()
        out[0] = 1
        assert comm.all_reduce(out)[0] == comm.size

    ranks(2, work)


def test_done_is_false_until_all_have_come(threads: Any) -> None:
    gate = threading.Event()

    def work(comm: Any) -> None:
        if comm.rank == 1:
            gate.wait()
        handle = comm.start.barrier()
        if comm.rank == 0:
            time.sleep(0.05)
            assert not handle.done()
            gate.set()
        handle.wait()

    threads(2, work)


def test_an_error_nobody_waits_for_breaks_the_group(ranks: Any) -> None:
    def work(comm: Any) -> str:
        comm.start.all_reduce(np.ones(3 + comm.rank))
        with pytest.raises(CommunicationError, match="different calls") as caught:
            while True:
                comm.barrier()
        return str(caught.value)

    for message in ranks(2, work):
        assert "float64[3]" in message
        assert "float64[4]" in message
        assert "test_start.py" in message


def test_python_reductions_are_refused_in_the_background(threads: Any) -> None:
    def work(comm: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="without start"):
            comm.start.all_reduce(np.ones(1), Op(np.add))

    threads(1, work)


def test_threads_of_one_rank_may_share_a_communicator(ranks: Any) -> None:
    """Calls of one rank never run into one another, whichever thread makes them."""

    def work(comm: Any) -> None:
        sums: list[float] = []

        def add() -> None:
            sums.extend(float(comm.all_reduce(np.ones(2_000))[-1]) for _ in range(100))

        workers = [threading.Thread(target=add) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert sums == [comm.size] * 300

    ranks(2, work)
