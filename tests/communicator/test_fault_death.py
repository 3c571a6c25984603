"""A rank that dies, however and wherever: the others raise PeerLost, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundelay import _core
from roundelay.communicator import Communicator
from roundelay.communicator.selection import Selection
from roundelay.engines.shared_memory import SharedMemory

SOON = 20.0  # seconds from the death to the error: milliseconds, but never the timeout of 60


def left_behind() -> tuple[list[str], list[str]]:
    shared = [one.name for one in Path("/dev/shm").iterdir() if "roundelay" in one.name]
    return shared, sorted(one.name for one in Path("/proc/self/fd").iterdir())


WAITS: dict[str, Callable[[Any], Any]] = {
    "barrier": lambda c: c.barrier(),
    "large all_reduce": lambda c: c.all_reduce(np.ones(1_000_000)),
    "recv": lambda c: c.recv(np.ones(1), 1),
    "send more than fits": lambda c: c.send(np.ones(1_000_000), 1),
    "handle": lambda c: c.start.all_reduce(np.ones(3)).wait(),
    "message": lambda c: c.start.recv(np.ones(3), 1).wait(),
    "split": lambda c: c.split(0),
    "empty": lambda c: c.empty(10),
    "objects": lambda c: c.all_gather_object("x"),
    "scatter": lambda c: c.scatter(None, 1),
}


@pytest.mark.parametrize("name", list(WAITS))
def test_death_is_noticed_in_every_wait(name: str, processes: Any) -> None:
    def work(comm: Any) -> str:
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        WAITS[name](comm)
        comm.barrier()  # a root may have gone on without the others
        return "went on"

    found = processes.outcomes(3, work)
    assert [one.error for one in found] == ["PeerLost", "", "PeerLost"]
    assert all("Rank 1" in found[rank].message for rank in (0, 2))
    assert all(found[rank].ended - found[1].gone < SOON for rank in (0, 2))


@pytest.mark.parametrize("how", ["SIGSEGV", "SIGTERM", "exit"])
def test_whatever_killed_it(how: str, processes: Any) -> None:
    def work(comm: Any) -> None:
        comm.barrier()
        if comm.rank == 0:
            if how == "exit":
                os._exit(3)
            signal.signal(getattr(signal, how), signal.SIG_DFL)
            os.kill(os.getpid(), getattr(signal, how))
        for _ in range(3):
            with pytest.raises(Exception, match=r"Rank 0 .* died"):
                comm.barrier()

    found = processes.outcomes(2, work)
    assert not found[1].error, found[1].trace


def test_a_rank_that_dies_before_it_begins(processes: Any) -> None:
    def work(comm: Any) -> None:
        comm.barrier()

    real = _core.World.enter

    def enter(world: Any, rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        real(world, rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core.World, "enter", enter)
        found = processes.outcomes(2, work)
    assert found[0].error == "PeerLost"


def threads_of_this_process() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:roundelay")


def test_a_thousand_worlds_leave_nothing() -> None:
    def cycle() -> None:
        world = _core.World.create(2, 1 << 24)
        pair = []
        for rank in range(2):
            world.enter(rank)
            pair.append(Communicator(SharedMemory(world, rank, Selection(world.size))))
        handles = [comm.start.all_reduce(np.ones(9)) for comm in pair]
        assert [handle.wait()[0] for handle in handles] == [2.0, 2.0]
        sent = [comm.start.send(np.ones(20_000), 1 - comm.rank) for comm in pair]
        for comm in pair:
            comm.recv(np.ones(20_000), 1 - comm.rank)
        for message in sent:
            message.wait()
        for comm in pair:
            comm.end("closed", together=False)  # one thread can't wait for itself

    for _ in range(3):
        cycle()
    gc.collect()
    before = (left_behind(), threads_of_this_process(), mappings())
    for turn in range(1000):
        cycle()
        if turn % 100 == 99:
            gc.collect()
    gc.collect()
    assert (left_behind(), threads_of_this_process(), mappings()) == before
