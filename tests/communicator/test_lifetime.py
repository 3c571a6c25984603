"""Nothing outlives its owner: handles, buffers and groups, in threads, signals, forks and exits."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.communicator.point_to_point import ANY
from roundelay.errors import (
    CollectiveMismatch,
    CommunicationError,
    InvalidArgumentError,
    PeerLost,
)

SIZES = (1, 2, 3, 4, 7)
FOR_EVER = 1000.0  # seconds: a test that has to wait for it counts as hanging


@pytest.mark.parametrize("size", SIZES)
def test_after_close_every_handle_has_its_result(size: int, ranks: Any) -> None:
    def work(comm: Any) -> None:
        group = comm.split(0, -comm.rank)
        after, before = (comm.rank + 1) % size, (comm.rank - 1) % size
        handles = [
            one.start.all_reduce(np.ones(numel))
            for numel in (1, 200_000)
            for one in (comm, group, group.split(0))  # the last is kept by its handle alone
        ]
        sent = comm.start.send(np.full(100_000, 1.0 * comm.rank), after)
        got = group.start.recv(np.empty(3), size - 1 - before)
        other = group.start.send(np.full(3, 1.0 * comm.rank), size - 1 - after)
        came = comm.start.recv(np.empty(100_000), ANY)
        for _ in range(2):
            comm.close()
        assert all(handle.done() for handle in (*handles, sent, got, other, came))
        assert all((handle.wait() == size).all() for handle in handles)
        assert (got.wait() == before).all()
        assert (came.wait() == before).all()
        for refused in (comm.barrier, comm.start.barrier, group.barrier, group.start.barrier):
            with pytest.raises(InvalidArgumentError, match="closed"):
                refused()

    ranks(size, work, timeout=FOR_EVER)


@pytest.mark.parametrize("where", ["private", "arena"])
def test_a_call_outlives_all_that_it_was_made_of(where: str, ranks: Any) -> None:
    """Whatever is dropped, in whatever order: who still holds a handle gets the right result."""

    def work(comm: Any) -> None:
        for order in itertools.permutations(("handle", "group", "buffer")):
            group = comm.split(0)
            buffer = group.empty(60_000) if where == "arena" else np.empty(60_000)
            buffer[:] = 1
            come, told = comm.start.recv(np.empty(1), 0, 5) if comm.rank else None, np.ones(1)
            things = {"group": group, "buffer": buffer}
            if comm.rank == 1:
                things["handle"] = group.start.all_reduce(buffer)
            else:  # in flight while rank 1 lets go: this rank has not come yet
                comm.recv(np.empty(1), 1, 6)
                things["handle"] = group.start.all_reduce(buffer)
            del group, buffer
            for name in order if comm.rank == 1 else ("group", "buffer"):
                del things[name]
                gc.collect()
            if comm.rank == 1:
                for other in set(range(comm.size)) - {1}:
                    comm.send(told, other, 6)
            else:
                assert (things["handle"].wait() == comm.size).all()
            for other in range(1, comm.size if comm.rank == 0 else 0):
                comm.send(told, other, 5)
            if come is not None:
                come.wait()

    ranks(3, work)


def test_a_dropped_call_is_waited_for_at_the_end(ranks: Any) -> None:
    def work(comm: Any) -> Any:
        group = comm.split(0)
        if comm.rank == 0:
            group.start.all_reduce(np.ones(50_000))  # nobody keeps anything of it
            return None
        time.sleep(0.2)
        return group.all_reduce(np.ones(50_000))[-1]

    assert ranks(3, work, timeout=FOR_EVER)[1:] == [3, 3]


def test_who_closes_a_group_that_others_need_is_named_at_once(ranks: Any) -> None:
    def work(comm: Any) -> None:
        group = comm.split(0)
        if comm.rank == 1:
            group.close()
            with pytest.raises(CollectiveMismatch, match="rank 1: closed the communicator at"):
                comm.recv(np.empty(1), 0)
        elif comm.rank == 0:
            group.start.all_reduce(np.ones(5))
            with pytest.raises(CollectiveMismatch, match="rank 1: closed the communicator at"):
                group.close()
        else:
            with pytest.raises(CollectiveMismatch, match="rank 1: closed the communicator at"):
                group.recv(np.empty(1), 1)

    ranks(3, work, timeout=FOR_EVER)


@pytest.mark.parametrize("source", [1, ANY], ids=repr)
def test_a_receive_that_nobody_is_left_to_send_is_cancelled(source: Any, ranks: Any) -> None:
    def work(comm: Any) -> None:
        group = comm.split(0)
        for closed in (group, comm):
            handle = closed.start.recv(np.empty(3), source, 9)
            closed.close()
            assert handle.done()
            with pytest.raises(PeerLost, match=r"recv on rank . from .*rank.*nobody was left"):
                handle.wait()
            if closed is group:
                comm.barrier()  # the job is unharmed

    ranks(2, work, timeout=FOR_EVER)


def test_close_raises_what_nobody_has_heard(ranks: Any) -> None:
    def work(comm: Any) -> None:
        handle = comm.start.all_reduce(np.ones(3 + comm.rank))
        with pytest.raises(CollectiveMismatch, match="test_lifetime"):
            comm.close()
        comm.close()
        with pytest.raises(CollectiveMismatch, match="test_lifetime"):
            handle.wait()

    ranks(2, work)


def test_close_is_silent_about_what_was_raised_before(ranks: Any) -> None:
    def work(comm: Any) -> None:
        with pytest.raises(CollectiveMismatch):
            comm.start.all_reduce(np.ones(3 + comm.rank)).wait()
        comm.start.recv(np.empty(1), 0)
        comm.close()

    outcomes = ranks.outcomes(2, work)
    assert [one.error for one in outcomes] == ["CollectiveMismatch"] * 2  # of starting once more


def test_a_call_that_was_waited_for_keeps_no_buffers(ranks: Any) -> None:
    """Also the last one, that no other follows."""

    def work(comm: Any) -> None:
        starts: list[Callable[[Any], Any]] = [
            lambda x: comm.start.all_reduce(x, out=x),
            lambda x: comm.start.all_gather(np.ones(4), out=x, axis=0),
            lambda x: (comm.start.send if comm.rank else comm.start.recv)(x, 1 - comm.rank),
        ]
        for start in starts:
            buffer = np.ones(8)
            seen = weakref.ref(buffer)
            handle = start(buffer)
            handle.wait()
            del handle, buffer
            assert seen() is None

    ranks(2, work)


def test_a_rank_that_fails_keeps_no_buffers(threads: Any) -> None:
    """Also those of calls that never end: a receive, a send that does not fit, a collective."""
    buffers: list[weakref.ref[Any]] = []

    def work(comm: Any) -> None:
        made = [comm.empty(100_000) for _ in range(3)]
        buffers.extend(map(weakref.ref, made))
        comm.start.recv(made[0], 0, 1)
        comm.start.send(made[1], 1 - comm.rank, 2)
        if comm.rank == 0:
            comm.start.all_reduce(made[2])
        del made
        raise KeyError("on purpose")

    assert all(one.error in ("KeyError", "PeerLost") for one in threads.outcomes(2, work))
    limit = time.monotonic() + 20
    while any(one() is not None for one in buffers):
        assert time.monotonic() < limit, "buffers of calls that are over are kept"
        time.sleep(0.01)
        threads(1, lambda _: gc.collect())  # a new world sweeps up after the old ones


def test_closing_waits_for_the_calls_of_other_threads(ranks: Any) -> None:
    def work(comm: Any) -> None:
        sums: list[float] = []

        def add() -> None:
            sums.append(float(comm.all_reduce(np.ones(1))[0]))

        if comm.rank == 0:
            adder = threading.Thread(target=add)
            adder.start()
            while not comm._engine.world.calls(comm._engine.at)[2][0][2][0]:
                time.sleep(0.001)
            comm.close()
            adder.join()
        else:
            time.sleep(0.1)
            add()
        assert sums == [comm.size]

    ranks(2, work, timeout=FOR_EVER)


def test_several_threads_may_close_at_once(ranks: Any) -> None:
    """One of them waits for what is under way; the others do not leave before it has come."""

    def work(comm: Any) -> None:
        group = comm.split(0)
        time.sleep(0.1 * comm.rank)  # so that the others close while a call waits
        handle = group.start.all_reduce(np.ones(3))
        closers = [threading.Thread(target=one.close) for one in (group, comm, group, comm)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        comm.close()
        assert (handle.wait() == comm.size).all()

    ranks(2, work, timeout=FOR_EVER)


def in_the_middle(comm: Any, action: Callable[[], Any]) -> list[Any]:
    """Have rank 0 do something in a signal handler while it waits in an all-reduce."""
    found: list[Any] = []

    def handler(*_: object) -> None:
        try:
            found.append(action())
        except InvalidArgumentError as error:
            found.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    comm.barrier()
    if comm.rank == 0:
        pid = os.getpid()
        threading.Timer(0.1, lambda: os.kill(pid, signal.SIGUSR1)).start()
    else:
        comm.recv(np.empty(1), 0, 7)  # until the handler has run
    handle = comm.start.barrier() if comm.rank == 0 and comm.size == 3 else None
    if comm.rank and comm.size == 3:
        comm.barrier()
    assert (comm.all_reduce(np.ones(2)) == comm.size).all()
    if handle is not None:
        handle.wait()
    signal.signal(signal.SIGUSR1, before)
    return found


REFUSED: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(1)),
    "barrier": lambda comm: comm.barrier(),
    "broadcast": lambda comm: comm.broadcast(np.ones(100_000), algorithm="binomial"),
    "wait": lambda comm: comm.start.all_reduce(np.ones(1)).wait(),
    "close": lambda comm: comm.close(),
}


@pytest.mark.parametrize("size", [2, 3], ids=["waiting", "in line"])
@pytest.mark.parametrize("call", REFUSED)
def test_a_handler_is_refused_what_it_would_wait_for_in_vain(
    call: str, size: int, processes: Any
) -> None:
    def work(comm: Any) -> list[str]:
        def action() -> None:
            try:
                REFUSED[call](comm)
            finally:
                for other in range(1, comm.size):
                    comm.send(np.ones(1), other, 7)

        found: list[str] = in_the_middle(comm, action)
        if call == "wait" and comm.rank:  # what it began runs after the call around it
            comm.all_reduce(np.ones(1))
        return found

    told = processes(size, work, timeout=FOR_EVER)[0]
    assert len(told) == 1
    assert told[0].startswith(call)
    assert "in the middle of all_reduce" in told[0]
    assert "test_lifetime.py" in told[0]


@pytest.mark.parametrize("size", [2, 3])
def test_a_handler_may_communicate_elsewhere(size: int, processes: Any) -> None:
    def work(comm: Any) -> Any:
        group = comm.split(0)
        later: list[Any] = []

        def action() -> float:
            for other in range(1, size):
                comm.send(np.ones(1), other, 7)
            later.append(comm.start.all_reduce(np.ones(1)))
            return float(group.all_reduce(np.ones(1))[0])

        helper = threading.Thread(target=group.all_reduce, args=(np.ones(1),))
        if comm.rank:
            helper.start()
        found = in_the_middle(comm, action)
        if comm.rank:
            helper.join()
            return comm.all_reduce(np.ones(1))[0]
        return found, later[0].wait()[0]

    assert processes(size, work, timeout=FOR_EVER) == [([size], size), *[size] * (size - 1)]


def test_a_child_forked_in_a_handler_is_no_second_rank(processes: Any) -> None:
    def work(comm: Any) -> Any:
        parent = os.getpid()
        pids: list[int] = []

        def fork() -> None:
            pids.append(os.fork())
            if pids[0]:
                for other in range(1, comm.size):
                    comm.send(np.ones(1), other, 7)

        try:
            in_the_middle(comm, fork)
        except CommunicationError as error:
            if os.getpid() != parent:
                os._exit(0 if "forked" in str(error) else 3)
            raise
        if os.getpid() != parent:
            os._exit(4)
        return comm.rank or os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])

    for size in (2, 3):
        assert processes(size, work, timeout=FOR_EVER) == list(range(size))


AT_EXIT = """
import sys, threading, time
import numpy as np
import roundelay as rd

inside = threading.Semaphore(0)

def wait_for_ever(comm):
    if comm.rank:
        inside.release()
        {call}
    time.sleep(1000)

threading.Thread(target=rd.run, args=(wait_for_ever, 4, "threads"), daemon=True).start()
for _ in range(3):
    inside.acquire()
time.sleep({delay})
sys.exit(5)
"""


@pytest.mark.parametrize(
    ("call", "delay"),
    [
        ("comm.barrier()", 0.2),
        ("comm.recv(np.empty(1), 0)", 0.0),
        ("comm.start.barrier().wait()", 0.2),
        ("comm.close() if comm.start.barrier() else None", 0.2),
    ],
)
def test_daemon_threads_inside_a_call_do_not_disturb_the_exit(call: str, delay: float) -> None:
    program = AT_EXIT.format(call=call, delay=delay)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (5, "")


FINALIZED = """
import os
import numpy as np
import roundelay as rd

class Last:
    def __del__(self, x=np.ones(2), write=os.write):
        for call in (comm.all_reduce, comm.all_gather, comm.start.scan, comm.barrier):
            try:
                call() if call == comm.barrier else call(x)
            except rd.RoundelayError as error:
                write(1, f"{error}\\n".encode())

comm = rd.init()
last = Last()
"""


def test_a_finalizer_that_runs_while_the_interpreter_ends_is_told_by_our_errors() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FINALIZED], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["This communicator is closed."] * 4
    assert done.stderr == ""


def test_a_copy_that_closes_is_told_by_name_on_the_quick_way_too() -> None:
    def work(comm: Any) -> None:
        comm.all_reduce(np.ones(2))  # by now the native core knows this call
        copy.copy(comm).close()
        with pytest.raises(InvalidArgumentError, match="closed"):
            comm.all_reduce(np.ones(2))

    rd.run(work, 1, "threads")
