"""Whom ranks wait for in the end is told: a stopped rank is called stopped, wherever it was."""

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

from roundelay import _core
from roundelay.errors import CollectiveTimeout, CommunicationError
from roundelay.live.snapshot import look

FIRST, LATER = 1.5, 60.0  # seconds; the rank with the short timeout is the first to give up
SOON = 20.0


def until(what: Callable[[], bool]) -> None:
    limit = time.monotonic() + SOON
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.005)


def is_stopped(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    return stat.rsplit(")", 1)[1].split()[0] == "T"


def stop(comm: Any, rank: int) -> None:
    pid = comm._engine.world.pid(rank)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(pid))


def told(comm: Any, work: Callable[[], Any], victim: int) -> str:
    """Return the error of a rank; whoever is the first to hear it lets the victim go on."""
    comm.timeout = FIRST if comm.rank == 0 else LATER
    with pytest.raises((CollectiveTimeout, CommunicationError)) as caught:
        work()
    if comm.rank == 0:
        os.kill(comm._engine.world.pid(victim), signal.SIGCONT)
    return str(caught.value)


def each_rank_once(message: str, size: int) -> None:
    """No line of a report names a rank twice, and every rank is in a line."""
    lines = re.findall(r"^  ranks? ([\d, ]+): ", message, re.MULTILINE)
    named = [[int(rank) for rank in line.split(", ")] for line in lines]
    assert all(len(set(line)) == len(line) for line in named), message
    assert {rank for line in named for rank in line} == set(range(size)), message


#: What everybody waits in: of some, only a few wait for the stopped rank themselves.
WAITS: dict[str, Callable[[Any], Any]] = {
    "recv": lambda comm: comm.recv(np.ones(4), min(comm.rank + 1, comm.size - 1)),
    "broadcast": lambda comm: comm.broadcast(np.ones(4), root=comm.size - 1),
    "all_reduce": lambda comm: comm.all_reduce(np.ones(4)),
    "large": lambda comm: comm.reduce(np.ones(300_000), root=0),
    "ring": lambda comm: comm.all_reduce(np.ones(300_000), algorithm="ring"),
}


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("call", WAITS)
def test_who_is_stopped_is_told_by_everybody(call: str, size: int, processes: Any) -> None:
    """However many ranks wait in between, and whoever gives up first."""
    victim = size - 1

    def work(comm: Any) -> str:
        comm.barrier()
        if comm.rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
            with pytest.raises(CollectiveTimeout) as caught:  # it goes on when all is over
                until(lambda: comm._engine.world.trouble is not None)
                WAITS[call](comm)
            return str(caught.value)
        return told(comm, lambda: WAITS[call](comm), victim)

    for message in processes(size, work):
        stopped = r"stopped \(process \d+ does not run\)"
        assert re.search(rf"^Rank 0 waited .* rank {victim}, which is {stopped}\.", message)
        assert re.search(rf"^  rank {victim}: {stopped}; its last call was ", message, re.MULTILINE)
        assert "circle" not in message
        assert "came too late" not in message
        each_rank_once(message, size)


@pytest.mark.parametrize("numel", [4, 300_000])
def test_who_is_stopped_inside_a_call_is_told_as_stopped(numel: int, processes: Any) -> None:
    """At every point of it: it has not come too late, and waits for nobody."""

    def work(point: int) -> Callable[[Any], str]:
        def run(comm: Any) -> str:
            comm.barrier()
            comm.timeout = FIRST if comm.rank == 0 else LATER
            if comm.rank == 1:
                _core.set_kill_point(point, signal.SIGSTOP)
            try:
                comm.reduce(np.ones(numel), root=0)
                comm.barrier()
                comm.close()  # who had made the barrier when it was stopped hears of it here
            except CollectiveTimeout as error:
                return str(error)
            finally:
                _core.set_kill_point(0)
                if comm.rank == 0:
                    os.kill(comm._engine.world.pid(1), signal.SIGCONT)
            return ""

        return run

    hit = 0
    runs = processes.side_by_side(3, [work(point) for point in (1, 2, 3, 5, 8, 13)])
    for found in runs:
        assert not [one for one in found if one.error or one.signal], found
        for message in (one.value for one in found if one.value):
            hit += 1
            assert re.search(r"\n  rank 1: stopped \(process \d+ does not run\); ", message)
            assert "circle" not in message
            each_rank_once(message, 3)
    assert hit


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_stopped_rank_is_in_no_circle(size: int, processes: Any) -> None:
    """What it waited for has come meanwhile: it answers as soon as it goes on."""
    victim = size - 1

    def work(comm: Any) -> str:
        world, right, x = comm._engine.world, (comm.rank + 1) % size, np.ones(4)
        comm.barrier()
        if comm.rank == victim:
            comm.timeout = LATER
            comm.recv(x, 0)
            with pytest.raises(CollectiveTimeout) as caught:
                until(lambda: world.trouble is not None)
                comm.send(x, victim - 1)
            return str(caught.value)
        if comm.rank == 0:
            until(lambda: all(world.waits(other) for other in range(1, size)))
            stop(comm, victim)
            names = comm._engine.selector.algorithms
            until(lambda: look(world, names).ranks[victim].state == "stopped")
            assert look(world, names).straggler == victim  # though it shows that it waits for me
            comm.send(x, victim)
        return told(comm, lambda: comm.recv(x, right), victim)

    for message in processes(size, work):
        assert "circle" not in message
        assert re.search(rf"^Rank 0 .* rank {victim}, which is stopped \(", message)
        line = rf"\n  rank {victim}: stopped \(.* does not run\); it was in recv from rank 0, tag 0"
        assert re.search(line, message)
        each_rank_once(message, size)


def test_a_circle_of_others_is_told_beside_a_stopped_rank(processes: Any) -> None:
    def work(comm: Any) -> str:
        comm.barrier()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
            return ""
        if comm.rank == 0:
            until(lambda: is_stopped(comm._engine.world.pid(2)))
        return told(comm, lambda: comm.recv(np.ones(4), 1 - comm.rank), 2)

    found = processes.outcomes(3, work)
    for message in (found[0].value, found[1].value):
        assert "They wait in a circle: rank 0 waits for rank 1, rank 1 waits for rank 0" in message
        assert re.search(r"^  rank 2: stopped \(", message, re.MULTILINE)


@pytest.mark.parametrize("size", [2, 4])
def test_who_is_busy_at_the_end_of_the_waiting_is_told(size: int, ranks: Any) -> None:
    busy = size - 1

    def work(comm: Any) -> str:
        comm.barrier()
        if comm.rank == busy:
            until(lambda: comm._engine.world.trouble is not None)
            with pytest.raises(CollectiveTimeout) as caught:
                comm.barrier()
            return str(caught.value)
        comm.timeout = 0.8 if comm.rank == 0 else LATER
        with pytest.raises(CollectiveTimeout) as caught:
            comm.recv(np.ones(4), comm.rank + 1)
        return str(caught.value)

    for message in ranks(size, work):
        end = (
            rf"rank {busy}, which is running but has not entered this call"
            if size == 2
            else rf"rank 1, which waits itself, in the end for rank {busy}, which is running and "
        )
        assert f"Rank 0 waited 0.8 s for {end}" in message
        each_rank_once(message, size)


def test_a_rank_is_named_once_whatever_its_threads_wait_for(ranks: Any) -> None:
    def work(comm: Any) -> str:
        comm.barrier()
        messages: list[str] = []

        def wait() -> None:
            try:
                comm.recv(np.ones(4), 1)
            except CollectiveTimeout as error:
                messages.append(str(error))

        if comm.rank == 0:
            threads = [threading.Thread(target=wait) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return messages[0]
        until(lambda: comm._engine.world.trouble is not None)
        with pytest.raises(CollectiveTimeout) as caught:
            comm.barrier()
        return str(caught.value)

    for message in ranks(2, work, timeout=1):
        each_rank_once(message, 2)
