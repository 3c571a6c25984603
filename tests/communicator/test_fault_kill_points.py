"""A rank killed at every point of a run: the others raise soon, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundelay import _core

SOON = 20.0  # seconds from a death to all errors: milliseconds, but never the timeout of 60
AT_ONCE = 4  # worlds side by side: most of their time is sleep
ONE_IN = 12  # points of a sample; without --sample it is every point


PAST, READ = 1, -1  # of the ways of a call: slots written past the caches; reading others' memory


@contextmanager
def way(comm: Any, number: int) -> Iterator[None]:
    """Have all ranks take this way, which ranks that are threads are told together."""
    _core.force_way(number)
    comm.barrier()
    yield
    comm.barrier()
    _core.force_way(None)
    comm.barrier()


def workload(comm: Any) -> None:
    """Call a bit of everything: small, sliced, in the arena, by every way, in background, mail."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arena = comm.empty(10_000, np.float32)
    arena[:] = 1
    registered = np.ones(10_000, np.float32)
    comm.register(registered)
    for x in (np.ones(2), np.ones(1000), np.ones(70_000), arena, registered):  # one in three slices
        assert (comm.all_reduce(x) == comm.size).all()
    assert (comm.broadcast(np.full(10, comm.rank), comm.size - 1) == comm.size - 1).all()
    for _ in range(4):  # of the second on, each is a run of a race
        assert (comm.scan(np.ones(1000)) == comm.rank + 1).all()
    with way(comm, PAST):
        assert (comm.all_reduce(np.ones(70_000)) == comm.size).all()
    with way(comm, READ):  # moved, and folded piece by piece
        moved = comm.all_to_all(np.full((comm.size, 40_000), comm.rank))
        assert (moved[:, 0] == np.arange(comm.size)).all()
        folded = comm.reduce_scatter(np.ones((comm.size, (4 << 20) // 8 // comm.size + 1)))
        assert (folded == comm.size).all()
    pending = comm.start.all_to_all(np.full((comm.size, 5), comm.rank))
    coming = comm.start.recv(np.empty(3), left, tag=1)
    more_than_fits = np.full(9000, comm.rank)
    assert (comm.sendrecv(more_than_fits, right, np.empty(9000, int), left) == left).all()
    comm.send(np.full(3, comm.rank + 0.5), right, tag=1)
    assert (coming.wait() == left + 0.5).all()
    assert (pending.wait()[:, 0] == np.arange(comm.size)).all()
    comm.split(comm.rank % 2).barrier()
    comm.barrier()


def struck(
    work: Callable[[Any], None], points: dict[int, int], by: int = signal.SIGKILL
) -> Callable[[Any], None]:
    """Have these ranks get the signal at the n-th point of the work, if it has so many."""

    def run(comm: Any) -> None:
        _core.set_kill_point(points.get(comm.rank, 0), by)
        work(comm)
        _core.set_kill_point(0)
        comm.barrier()  # nobody gets away before the last point has been passed

    return run


def at_every_point(
    points: Iterator[int],
    processes: Any,
    size: int,
    victims: Sequence[int],
    strike: Callable[[int, int], Callable[[Any], Any]],
    hit: Callable[[int, list[Any]], bool],
) -> Iterator[tuple[int, list[Any]]]:
    """Strike at these points until the run of every victim ends unharmed; they take turns.

    Give the victim and every rank's outcome, for each point at which somebody was hit.
    """
    left, turns = set(victims), cycle(victims)
    while left:
        chosen: list[tuple[int, int]] = []
        while len(chosen) < AT_ONCE:
            point, victim = next(points), next(turns)
            if victim in left:
                chosen.append((victim, point))
        runs = [strike(victim, at) for victim, at in chosen]
        for (victim, _), found in zip(chosen, processes.side_by_side(size, runs), strict=True):
            if hit(victim, found):
                yield victim, found
            else:
                assert not [one.trace for one in found if one.error]
                left.discard(victim)


def left_behind() -> tuple[list[str], list[str], list[str]]:
    shared = [one.name for one in Path("/dev/shm").iterdir() if "roundelay" in one.name]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return shared, children, sorted(one.name for one in Path("/proc/self/fd").iterdir())


#: Every victim at every point where ranks are few; in turns where they are many.
VICTIMS = [
    *[(size, [victim]) for size in (2, 3) for victim in range(size)],
    *[(size, list(range(size))) for size in (4, 7)],
]


@pytest.mark.parametrize(("size", "victims"), VICTIMS)
def test_killed_at_every_point(
    size: int, victims: list[int], threads: Any, processes: Any, sample: Any
) -> None:
    threads(size, workload)  # the programs are compiled once; forked ranks find them made
    before, deaths = left_behind(), 0

    def kill(victim: int, point: int) -> Callable[[Any], None]:
        return struck(workload, {victim: point})

    def hit(victim: int, found: list[Any]) -> bool:
        return bool(found[victim].signal)

    points = sample.points(ONE_IN)
    for victim, found in at_every_point(points, processes, size, victims, kill, hit):
        deaths += 1
        assert found[victim].signal == signal.SIGKILL
        for rank, one in enumerate(found):
            if rank == victim:
                continue
            assert one.error == "PeerLost", (deaths, victim, rank, one)
            assert re.match(rf"Rank {victim} \(process \d+\) died\.", one.message), one.message
            assert one.ended - found[victim].gone < SOON, (deaths, victim, rank, one)
    assert deaths > sample.fewer(20 * size, ONE_IN)
    assert left_behind() == before


def stopped_for_a_while(size: int, victim: int, point: int) -> Callable[[Any], bool]:
    """Stop a rank at a point, and have the next one let it go on; it tells whether it did."""
    work = struck(workload, {victim: point}, signal.SIGSTOP)

    def wake(world: Any, over: threading.Event, woken: list[int]) -> None:
        while not over.wait(0.005):
            pid = world.pid(victim)
            if pid and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
                time.sleep(0.06)  # until the others have gone to sleep over it
                woken.append(pid)
                os.kill(pid, signal.SIGCONT)
                return

    def run(comm: Any) -> bool:
        over, woken = threading.Event(), list[int]()
        thread = threading.Thread(target=wake, args=(comm._engine.world, over, woken))
        if comm.rank == (victim + 1) % size:
            thread.start()
        work(comm)
        over.set()
        if thread.ident:
            thread.join()
        return bool(woken)

    return run


@pytest.mark.parametrize(("size", "victims"), [(2, [0]), (3, [0, 1, 2])])
def test_stopped_at_every_point_gives_the_right_result(
    size: int, victims: list[int], threads: Any, processes: Any, sample: Any
) -> None:
    threads(size, workload)

    def hit(victim: int, found: list[Any]) -> bool:
        return bool(found[(victim + 1) % size].value)

    stops = 0
    for _, found in at_every_point(
        sample.points(ONE_IN), processes, size, victims, partial(stopped_for_a_while, size), hit
    ):
        stops += 1
        assert not [one for one in found if one.error or one.signal], found
    assert stops > sample.fewer(20 * size, ONE_IN)


@pytest.mark.parametrize("size", [3, 4])
def test_a_second_one_dies_at_every_point_of_the_same_run(
    size: int, processes: Any, sample: Any
) -> None:
    """Also while it is about to tell of the first: then nobody may wait for what it did not say."""
    before = left_behind()
    for first in (7, 30):  # in a wait of the others, and in the middle of slices
        for point in takewhile(lambda point: point < 200, sample.points(ONE_IN)):
            (found,) = processes.side_by_side(size, [struck(workload, {0: first, 1: point})])
            for one in found[2:]:
                assert one.error == "PeerLost", one
                assert re.match(r"Rank [01] \(process \d+\) died\.", one.message), one.message
            if not found[1].signal:
                break
        else:
            pytest.fail("the second rank has no end of points")
    assert left_behind() == before


def disagree(comm: Any) -> None:
    """Call something else on the last rank."""
    if comm.rank == comm.size - 1:
        comm.barrier()
    comm.all_reduce(np.ones(3))


@pytest.mark.parametrize("size", [2, 3])
def test_killed_while_a_mismatch_is_told(size: int, processes: Any, sample: Any) -> None:
    for victim in range(size):
        for point in takewhile(lambda point: point < 100, sample.points(ONE_IN)):
            (found,) = processes.side_by_side(size, [struck(disagree, {victim: point})])
            errors = {one.error for rank, one in enumerate(found) if rank != victim}
            assert errors <= {"PeerLost", "CollectiveMismatch"}, found
            if not found[victim].signal:
                break
        else:
            pytest.fail("a mismatch has no end of points")
