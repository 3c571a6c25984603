"""Ways to run a call: the same bits by each, and which one is taken is the same on all ranks."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from roundelay import _core, tuning
from roundelay.algorithms import algorithms
from roundelay.schedule import compile_schedule, prove_program
from roundelay.tuning import default_for

WINDOW = 32  # turns until a result is known
MOST_WAYS = 8
COUNTS = (3, 1500, 40_001, 130_000)  # in the cell, in one slice, in several


@pytest.fixture
def force() -> Iterator[Callable[[int], None]]:
    yield _core.force_way
    _core.force_way(None)


def digest(result: Any) -> bytes:
    return b"" if result is None else hashlib.sha1(np.asarray(result).tobytes()).digest()


def results(comm: Any, count: int) -> list[bytes]:
    """Return what every call gives on this rank."""
    rng, last = np.random.default_rng(comm.rank), comm.size - 1
    found: list[Any] = []
    for dtype in ("float32", "float16", "int8", "complex128"):
        x = (rng.standard_normal(count) * 9).astype(dtype)
        rows = np.stack([np.roll(x, row) for row in range(comm.size)])
        lengths = [count // comm.size + rank for rank in range(comm.size)]
        found += [
            comm.all_reduce(x.copy()),
            comm.all_reduce(x, "prod", out=np.empty_like(x)),
            comm.all_reduce(x.copy(), "avg") if dtype != "int8" else None,
            comm.reduce(x.copy(), root=last),
            comm.reduce(x, out=np.empty_like(x)),
            comm.broadcast(x.copy(), root=last),
            comm.all_gather(x),
            comm.gather(x, root=last),
            comm.scatter(rows if comm.rank == last else None, root=last),
            comm.all_to_all(rows),
            comm.reduce_scatter(rows),
            comm.scan(x.copy()),
            comm.exscan(x.copy()),
            comm.start.all_reduce(x.copy()).wait(),
            comm.all_gather(x[: lengths[comm.rank]], axis=0, counts=lengths)
            if count > 20
            else None,
        ]
        arena = comm.empty(count, dtype)
        arena[:] = x
        found += [comm.all_reduce(arena), comm.all_gather(arena), comm.gather(arena, root=last)]
        if dtype == "float32":
            found += [
                comm.all_reduce(x.copy(), wire="bf16"),
                comm.all_reduce(x, "avg", out=np.empty_like(x), wire="bf16"),
                comm.reduce_scatter(rows, wire="bf16"),
                comm.all_gather(x, wire="bf16"),
                comm.all_gather(x[: lengths[comm.rank]], axis=0, counts=lengths, wire="bf16")
                if count > 20
                else None,
            ]
    return [digest(one) for one in found]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_every_way_gives_the_same_bits(
    size: int, count: int, force: Callable[[int], None], ranks: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tuning, "READING_FROM", 1)
    monkeypatch.setattr(tuning, "RIVALS_FROM", 1)
    work = partial(results, count=count)
    force(0)
    usual = ranks(size, work)
    for way in range(1, MOST_WAYS):
        force(way)
        assert ranks(size, work) == usual, way


STEPS = 400
#: What a rank gets of what all in its group brought, by its place among them.
DUE: dict[str, Callable[[list[Any], int], Any]] = {
    "all_reduce": lambda every, _: np.add.accumulate(every)[-1],
    "scan": lambda every, place: np.add.accumulate(every)[place],
    "reduce": lambda every, place: None if place else np.add.accumulate(every)[-1],
    "broadcast": lambda every, _: every[0],
    "all_gather": lambda every, _: np.stack(every),
    "gather": lambda every, place: None if place else np.stack(every),
}


def drawn() -> Iterator[tuple[int, str, str]]:
    """Draw calls of several kinds, in groups, the same on all ranks."""
    rng = random.Random(5)
    for _ in range(STEPS):
        count = rng.choice([600, 2000, 9000, 70_000])
        yield count, rng.choice(["all", "all", "half"]), rng.choice(list(DUE))


def brought(count: int, rank: int, step: int) -> Any:
    return np.arange(count, dtype=np.float64) * (rank + 1) + step


def calls(comm: Any) -> list[bytes]:
    """Make them; each kind is raced meanwhile, and looked at, and now and then a rank is late."""
    groups, found = {"all": comm, "half": comm.split(comm.rank % 2)}, []
    for step, (count, group, name) in enumerate(drawn()):
        if step % 20 == 0 and comm.rank == step // 20 % comm.size:
            time.sleep(0.002)
        found.append(digest(getattr(groups[group], name)(brought(count, comm.rank, step))))
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_races_change_no_result(size: int, ranks: Any) -> None:
    for rank, found in enumerate(ranks(size, calls)):
        for step, (count, group, name) in enumerate(drawn()):
            members = range(size) if group == "all" else range(rank % 2, size, 2)
            every = [brought(count, one, step) for one in members]
            assert found[step] == digest(DUE[name](every, members.index(rank))), (rank, step, name)


@pytest.mark.parametrize("size", range(2, 17))
def test_rivals_are_proved_and_give_the_bits_of_the_usual(size: int) -> None:
    for collective, names in default_for(size).rivals.items():
        for name in names:
            algorithm = algorithms.load(name)
            assert algorithm.collective.name == collective
            assert tuning.keeps_every_bit(name, size)
            if size < 9:
                prove_program(compile_schedule(algorithm.schedule(size)))


class Clock:
    """Gives each call its place in time: ways take so long, and ranks come when they like."""

    def __init__(self, durations: Callable[[int, int, int], int], seed: int) -> None:
        self.durations, self.random = durations, random.Random(seed)
        self.calls: dict[int, list[int]] = {}
        self.now = 0
        self.measured = 0

    def __call__(self, call: int, rank: int, kind: int, way: int) -> tuple[int, int]:
        if call not in self.calls:
            self.calls[call] = [self.now + self.random.randrange(3_000_000) for _ in range(64)]
            self.now += 10_000_000
            self.measured += 1
        came = self.calls[call]
        over = max(came[:4]) + self.durations(call, kind, way)
        return came[rank], over - self.random.randrange(10)


def quick_and_slow(quickest: int, ways: int, _: int, kind: int, way: int) -> int:
    return 50_000 if way == (quickest + kind) % ways else 100_000


@pytest.mark.parametrize("ways", range(2, MOST_WAYS + 1))
@pytest.mark.parametrize("size_bytes", [8192, 8 << 20])
def test_the_quickest_is_taken_and_alike_on_all_ranks(ways: int, size_bytes: int) -> None:
    rng = random.Random(ways)
    for quickest in range(ways):
        clock = Clock(partial(quick_and_slow, quickest, ways), ways)
        kinds = [rng.choice([1, 2, 3]) for _ in range(3000)]
        taken = _core.simulate_races(4, kinds, ways, size_bytes, clock)
        assert all(one == taken[0] for one in taken)
        assert taken[0][0] == 0  # the usual one, while nothing is known
        late = [(kind, way) for kind, way in zip(kinds, taken[0], strict=True)][-1000:]
        right = sum(way == (quickest + kind) % ways for kind, way in late)
        assert right > 850


def test_what_changes_is_found_out() -> None:
    """A machine on which what was quick becomes slow: the next look sees it, long before a race."""
    changes = 2000

    def durations(call: int, _: int, way: int) -> int:
        return 3_000_000 if (way == 1) == (call >= changes) else 400_000

    taken = _core.simulate_races(4, [7] * 6000, 3, 8 << 20, Clock(durations, 1))[0]
    assert taken[changes - 100 : changes].count(1) > 80
    assert taken[changes + 100 :].count(1) < 200


def test_a_busy_machine_is_not_raced_on_all_the_time() -> None:
    noise = random.Random(3)
    held: dict[int, int] = {}

    def durations(call: int, _: int, way: int) -> int:
        return held.setdefault(call, (1 + way) * noise.choice([1_000_000, 9_000_000]))

    clock = Clock(durations, 2)
    taken = _core.simulate_races(4, [7] * 20_000, 3, 8 << 20, clock)[0]
    assert taken.count(0) > 18_000
    assert clock.measured < 4000


def test_ways_that_are_alike_stay_as_they_are() -> None:
    taken = _core.simulate_races(4, [7] * 5000, 4, 8 << 20, Clock(lambda *_: 1_000_000, 4))[0]
    assert taken.count(0) > 4500
