"""Many ranks: nothing is made before it is needed, then once for all; whoever ends is seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay import _core
from roundelay.algorithms import algorithms
from roundelay.communicator import Communicator
from roundelay.engines import COLLECTIVES
from roundelay.engines._native import programs
from roundelay.engines._native.encode import encoded, idle
from roundelay.engines._native.programs import IN_ARENA, PRIVATE
from roundelay.errors import CollectiveMismatch, PeerLost, RankFailed
from roundelay.schedule import Reach, compile_schedule

MANY = programs.ALONE_RANKS + 3
ENGINES = ("threads", "shared_memory")


def questions(size: int) -> list[tuple[str, int, Reach]]:
    """Return every algorithm with its first and last root, for private buffers and the arena."""
    found = []
    for each in algorithms:
        collective = each.collective
        reaches = [PRIVATE, *(r for name, r in IN_ARENA.items() if name == collective.name)]
        for root in {0, size - 1} if collective.rooted else {0}:
            found += [(each.name, root, reach) for reach in reaches]
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_compiled_before_it_is_needed(engine: str) -> None:
    assert rd.run(lambda comm: comm._engine._programs.made, MANY, engine) == [0] * MANY


@pytest.mark.parametrize("size", [programs.ALONE_RANKS, MANY, 16])
def test_a_rank_gets_its_program_of_the_whole(size: int) -> None:
    def mine(comm: Communicator) -> list[bytes]:
        return [comm._engine._programs._compiled(*asked) for asked in questions(size)]  # type: ignore[attr-defined]

    found = rd.run(mine, size, "threads")
    for at, (name, root, reach) in enumerate(questions(size)):
        programs = compile_schedule(algorithms.load(name).schedule(size, root), reach)
        assert [each[at] for each in found] == encoded(programs, range(size))


def test_a_program_of_many_ranks_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[Any] = Counter()
    lock, compile_all = threading.Lock(), programs.compiled

    def counting(*asked: Any) -> list[bytes]:
        with lock:
            made[asked] += 1
        return compile_all(*asked)

    monkeypatch.setattr(programs, "compiled", counting)

    def work(comm: Communicator) -> float:
        for _ in range(2):
            comm.all_gather(np.ones(3))
        pair = comm.split(0)
        assert pair is not None
        return float(pair.all_reduce(np.ones(1))[0])

    assert rd.run(work, MANY, "threads") == [MANY] * MANY
    assert set(made.values()) == {1}


@pytest.mark.parametrize("engine", ENGINES)
def test_plain_calls_are_quick_once_their_size_was_seen(engine: str) -> None:
    def work(comm: Communicator) -> list[list[bool]]:
        found = []
        for count in (1, 1000, 100_000):
            x = np.ones(count)
            found.append([comm._fast_path(COLLECTIVES["all_reduce"], x, x, 0, 0)])
            if not found[-1][0]:
                comm.all_reduce(x)
            found[-1].append(comm._fast_path(COLLECTIVES["all_reduce"], x, x, 0, 0))
        return found

    for ranks in rd.run(work, 3, engine):
        assert ranks == [[False, True], [True, True], [False, True]]


@pytest.fixture
def shelves() -> list[_core.Shelf]:
    world = _core.World.create(3)
    for rank in range(3):
        world.enter(rank)
    return [_core.Shelf(world, rank) for rank in range(3)]


def test_one_makes_and_all_read(shelves: list[_core.Shelf]) -> None:
    first, second, third = shelves
    assert first.take(7, 0) is True
    assert second.take(7, 1) is False
    first.put(7, [b"one", b"", b"three"])
    assert [each.take(7, part) for part, each in enumerate(shelves)] == [b"one", b"", b"three"]
    third.put(7, [b"other"] * 3)
    assert second.take(7, 0) == b"one"


def test_what_was_given_up_is_made_by_another(shelves: list[_core.Shelf]) -> None:
    first, second, _ = shelves
    assert first.take(7, 0) is True
    first.drop(7)
    assert second.take(7, 0) is True
    first.put(7, [b"late"])
    assert first.take(7, 0) is False


def test_who_makes_and_leaves_is_not_waited_for() -> None:
    world = _core.World.create(2)
    for rank in range(2):
        world.enter(rank)
    assert _core.Shelf(world, 0).take(7, 0) is True
    world.leave(0)
    assert _core.Shelf(world, 1).take(7, 0) is True


def test_a_full_shelf_leaves_everybody_to_himself(shelves: list[_core.Shelf]) -> None:
    for key in range(1, 257):
        assert shelves[0].take(key, 0) is True
    assert [each.take(1000, 0) for each in shelves] == [True] * 3
    shelves[0].put(1000, [b"nowhere"])
    assert shelves[1].take(1000, 0) is True


def test_bytes_that_are_no_program_are_refused() -> None:
    data = encoded(compile_schedule(algorithms.load("all_reduce_ring").schedule(3)), [1])[0]
    _core.Program(data)
    _core.Program(idle(1))
    for length in range(0, len(data), 4):
        with pytest.raises(RuntimeError, match="no program"):
            _core.Program(data[:length])
    with pytest.raises(RuntimeError, match="no program"):
        _core.Program(data + data)


def test_the_death_of_the_rank_that_compiles_is_seen_by_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def die(*_: object) -> list[bytes]:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    monkeypatch.setattr(programs, "compiled", die)

    def work(comm: Communicator) -> None:
        try:
            comm.barrier()
        except PeerLost:
            (tmp_path / str(comm.rank)).touch()
            raise

    with pytest.raises(RankFailed, match="SIGKILL"):
        rd.run(work, MANY)
    assert len(list(tmp_path.iterdir())) == MANY - 1


def test_a_different_first_call_of_many_is_named_on_every_rank() -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            if comm.rank == 1:
                comm.all_gather(np.ones(2))
            comm.all_reduce(np.ones(3))
            comm.barrier()
        return str(caught.value)

    for message in rd.run(work, MANY):
        assert "rank 1: all_gather #1 float64[2]" in message
        assert "all_reduce #1 float64[3]" in message


@pytest.mark.parametrize("lost", [1, 9, 10])
def test_a_death_is_seen_after_those_between_have_left(lost: int, tmp_path: Path) -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == lost:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        elif comm.rank == 0:
            try:
                comm.recv(np.empty(1), lost)
            except PeerLost as error:
                (tmp_path / "seen").write_text(str(error))
                raise

    with pytest.raises(RankFailed, match=f"Rank {lost}|rank {lost}"):
        rd.run(work, MANY)
    assert f"rank {lost}" in (tmp_path / "seen").read_text().lower()


@pytest.mark.parametrize("engine", ENGINES)
def test_messages_between_all_pairs_of_many(engine: str) -> None:
    def work(comm: Communicator) -> list[int]:
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        sent = [comm.start.send(np.array([comm.rank, other]), other) for other in others]
        found = [comm.recv(np.empty(2, np.int64), other).tolist() for other in others]
        for each in sent:
            each.wait()
        return [rank for rank, mine in found if mine == comm.rank]

    for rank, found in enumerate(rd.run(work, MANY, engine)):
        assert found == [other for other in range(MANY) if other != rank]


#: What a rank has for itself while 16 are there, in KiB, beyond a bare fork of the same process.
OWN_MEMORY = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "benchmarks")!r})
import start_up
start_up.timed(start_up.nothing, 9, "shared_memory")
print(start_up.memory(16, "shared_memory")[1])
"""


def test_a_rank_takes_little_memory_of_its_own(tmp_path: Path) -> None:
    said = subprocess.check_output([sys.executable, "-c", OWN_MEMORY], text=True, cwd=tmp_path)
    assert 0 < float(said) < 800  # half as much as it would with the parts that few ranks need
