"""Ranks that come late or not at all, are stopped, interrupted, or forked."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundelay.communicator import ANY
from roundelay.errors import CollectiveTimeout, CommunicationError

SOON = 20.0


def until_trouble(comm: Any) -> None:
    """Be alive and elsewhere until the others have lost their patience."""
    limit = time.monotonic() + SOON
    while comm._engine.world.trouble is None and time.monotonic() < limit:
        time.sleep(0.01)


def test_a_missing_call_times_out_and_says_what_is_missing(ranks: Any) -> None:
    def work(comm: Any) -> str:
        comm.barrier()
        if comm.rank == 1:
            until_trouble(comm)
        start = time.monotonic()
        with pytest.raises(CollectiveTimeout) as caught:
            comm.all_reduce(np.ones(3))
        assert time.monotonic() - start < SOON
        return str(caught.value)

    for message in ranks(3, work, timeout=0.3):
        assert "waited 0.3 s for rank 1, which is running but has not entered this" in message
        assert re.search(
            r"ranks? (0, )?1(, 2)?: (not waiting; its last call was barrier #1"
            r"|came too late to all_reduce #2)",
            message,
        )
        assert "test_fault_late.py" in message


@pytest.mark.parametrize("call", ["recv", "recv any", "send", "background"])
def test_mail_times_out(call: str, ranks: Any) -> None:
    def work(comm: Any) -> None:
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout, match=r"waited 0\.2 s"):
                if call == "recv":
                    comm.recv(np.ones(1), 1)
                elif call == "recv any":
                    comm.recv(np.ones(1), ANY)
                elif call == "send":
                    comm.send(np.ones(1_000_000), 1)
                else:
                    comm.start.barrier().wait()
        else:
            until_trouble(comm)
            with pytest.raises(CommunicationError):
                comm.barrier()

    ranks(2, work, timeout=0.2)


def test_timeouts_may_be_set_and_endless(ranks: Any) -> None:
    def work(comm: Any) -> None:
        for timeout in (float("inf"), 1e12, 5):
            comm.timeout = timeout
            assert comm.timeout == timeout
            if comm.rank == 0:
                time.sleep(0.1)
            comm.barrier()

    ranks(2, work)


def stop_me() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def wake(pid: int, after: float) -> threading.Thread:
    """Let a process go on a while after it has been seen to stop."""

    def go() -> None:
        stat = Path(f"/proc/{pid}/stat")
        while stat.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.005)
        time.sleep(after)
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=go)
    thread.start()
    return thread


def test_a_stopped_rank_is_named_as_stopped(processes: Any) -> None:
    def work(comm: Any) -> str:
        comm.barrier()
        if comm.rank == 1:
            stop_me()
        with pytest.raises(CollectiveTimeout) as caught:
            comm.all_reduce(np.ones(3))
        if comm.rank == 0:
            os.kill(comm._engine.world.pid(1), signal.SIGCONT)
        return str(caught.value)

    found = processes(3, work, timeout=0.7)
    assert all("rank 1, which is stopped" in one for one in found)  # it says so itself, too


def test_a_slow_rank_is_warned_of_once(processes: Any, capfd: Any) -> None:
    def work(comm: Any) -> None:
        comm.barrier()
        if comm.rank == 1:
            stop_me()
        waker = wake(comm._engine.world.pid(1), 6.0) if comm.rank == 0 else None
        assert comm.all_reduce(np.ones(3)).tolist() == [2.0] * 3
        if waker is not None:
            waker.join()

    processes(2, work, timeout=30)
    told = capfd.readouterr().err
    assert told.count("roundelay: rank 0 has waited 5 s for rank 1, which is stopped") == 1
    assert "all_reduce #2 float64[3] op=sum" in told
    assert "gives up after 30 s" in told


def test_a_rank_that_stops_after_its_last_call_is_named(processes: Any, capfd: Any) -> None:
    def work(comm: Any) -> None:
        comm.barrier()
        if comm.rank == 1:
            stop_me()
        if comm.rank == 0:
            wake(comm._engine.world.pid(1), 6.0)

    processes(2, work, timeout=30)
    told = capfd.readouterr().err
    assert (
        told.count("rank 0 has ended, and waited 5 s for the end of rank 1, which is stopped") == 1
    )
    assert "kill -CONT" in told


@pytest.mark.parametrize("numel", [3, 400_000])
def test_stopped_and_continued_gives_the_right_result(numel: int, processes: Any) -> None:
    """Whoever is stopped, and wherever, the numbers are right once it goes on."""

    def work(comm: Any) -> None:
        for turn in range(2 * comm.size):
            victim = turn % comm.size
            comm.barrier()
            waker = None
            if comm.rank == (victim + 1) % comm.size:
                waker = wake(comm._engine.world.pid(victim), 0.1)
            if comm.rank == victim:
                if turn < comm.size:
                    stop_me()
                else:  # somewhere in the call
                    killer = threading.Timer(0.001, stop_me)
                    killer.start()
            x = np.full(numel, comm.rank + 1.0 + turn)
            assert (comm.all_reduce(x) == 6 + 3 * turn).all()
            if waker is not None:
                waker.join()
            comm.barrier()

    processes(3, work)


@pytest.mark.parametrize("call", ["barrier", "large", "recv", "handle", "behind a background call"])
def test_ctrl_c_ends_every_wait(call: str, processes: Any) -> None:
    def work(comm: Any) -> None:
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.2)
            os.kill(comm._engine.world.pid(0), signal.SIGINT)
            with pytest.raises(CommunicationError):
                comm.recv(np.ones(1), 0)
            return
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            if call == "barrier":
                comm.barrier()
            elif call == "large":
                comm.all_reduce(np.ones(200_000))
            elif call == "recv":
                comm.recv(np.ones(1), 1)
            elif call == "handle":
                comm.start.barrier().wait()
            else:
                comm.start.barrier()
                comm.all_reduce(np.ones(1))
        assert time.monotonic() - start < SOON
        comm._engine.world.fail("interrupted", 0, "")

    processes(2, work)


def refused(comm: Any, handle: Any) -> list[str]:
    """Return the calls that a forked child was not refused."""
    calls = {
        "all_reduce": lambda: comm.all_reduce(np.ones(1)),
        "all_reduce large": lambda: comm.all_reduce(np.ones(100_000)),
        "barrier": comm.barrier,
        "send": lambda: comm.send(np.ones(1), 0),
        "recv": lambda: comm.recv(np.ones(1), 0),
        "split": lambda: comm.split(0),
        "empty": lambda: comm.empty(3),
        "start": comm.start.barrier,
        "wait": handle.wait,
        "object": lambda: comm.broadcast_object(3),
    }
    missed = []
    for name, call in calls.items():
        try:
            call()
        except CommunicationError as error:
            if "forked" not in str(error):
                missed.append(f"{name}: {error}")
        else:
            missed.append(name)
    return missed


def test_a_forked_child_is_refused_and_the_parent_unharmed(processes: Any) -> None:
    def work(comm: Any) -> None:
        handle = comm.start.all_reduce(np.ones(10))
        comm.start.send(np.ones(10), comm.rank)
        comm.barrier()
        pid = os.fork()
        if pid == 0:
            missed = refused(comm, handle)
            if missed:
                os.write(2, repr(missed).encode())
            comm.close()
            del comm, handle
            os._exit(len(missed))
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.3)  # long enough for a false alarm to spread
        assert (handle.wait() == comm.size).all()
        assert comm.all_reduce(np.ones(1)) == comm.size
        assert comm.recv(np.zeros(10), comm.rank).sum() == 10

    processes(3, work)


#: What makes a handle, or several that belong together; everybody sends to itself.
HANDLES: dict[str, Callable[[Any], Any]] = {
    "call": lambda comm: [comm.start.all_reduce(np.ones(3))],
    "send": lambda comm: [
        comm.start.send(np.ones(3), comm.rank), comm.start.recv(np.zeros(3), comm.rank)
    ],
    "recv": lambda comm: [
        comm.start.recv(np.zeros(3), comm.rank), comm.start.send(np.ones(3), comm.rank)
    ],
    "packed": lambda comm: [
        comm.start.recv(np.zeros(6)[::2], comm.rank), comm.start.send(np.ones(3), comm.rank)
    ],
    "sendrecv": lambda comm: [
        comm.start.sendrecv(np.ones(3), comm.rank, np.zeros(3), comm.rank)
    ],
}  # fmt: skip


@pytest.mark.parametrize("call", HANDLES)
def test_a_forked_child_has_the_results_that_its_parent_waited_for(
    call: str, processes: Any
) -> None:
    """And no others; whoever waits again gets what it got, and nothing is written once more."""

    def work(comm: Any) -> None:
        waited, under_way = HANDLES[call](comm), HANDLES[call](comm)
        results = [handle.wait() for handle in waited]
        results[0][...] = 7
        assert waited[0].wait() is results[0]
        assert (results[0] == 7).all()
        pid = os.fork()
        if pid == 0:
            missed = 0 if waited[0].done() and waited[0].wait() is results[0] else 1
            missed += 0 if (results[0] == 7).all() else 2
            try:
                under_way[0].wait()
                missed += 4
            except CommunicationError as error:
                missed += 0 if "forked" in str(error) else 8
            os._exit(missed)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        for handle in under_way:
            handle.wait()

    processes(2, work)


def test_a_childs_life_does_not_hide_its_parents_death(processes: Any) -> None:
    def work(comm: Any) -> None:
        child = comm.empty(1, np.int64)
        if comm.rank == 1:
            pid = os.fork()
            if pid == 0:
                time.sleep(30)
                os._exit(0)
            child[0] = pid
        pids = comm.all_gather(child)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            comm.barrier()
        except CommunicationError as error:
            assert "Rank 1" in str(error)  # the child is ended in any case
            assert time.monotonic() - start < SOON
        else:
            raise AssertionError("nobody noticed")
        finally:
            os.kill(int(pids[1, 0]), signal.SIGKILL)

    found = processes.outcomes(2, work)
    assert [one.error for one in found] == ["", ""], found
    assert found[1].signal == signal.SIGKILL
