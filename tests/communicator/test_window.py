"""Who needs nothing of the others runs ahead, by a window and no more, and nothing is lost."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from roundelay.errors import CollectiveMismatch
from roundelay.schedule import WINDOW

#: Calls from which some rank needs nothing: which rank that is, and the call with its result.
Call = Callable[[Any, np.ndarray], Any]
AHEAD: dict[str, tuple[int, Call]] = {
    "broadcast": (0, lambda c, x: c.broadcast(x, 0)),
    "broadcast from the last": (-1, lambda c, x: c.broadcast(x, c.size - 1)),
    "scatter": (0, lambda c, x: c.scatter(np.stack([x] * c.size), 0, out=np.empty_like(x))),
    "gather": (-1, lambda c, x: c.gather(x, 0)),
    "reduce": (-1, lambda c, x: c.reduce(x, root=0)),
    "scan": (0, lambda c, x: c.scan(x)),
}
#: float64: of a line; of several; and so that three slots just fit in a cell.
COUNTS = (1, 7, 42)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", list(AHEAD))
def test_who_needs_nothing_returns_before_the_others_come(name: str, size: int, ranks: Any) -> None:
    who, call = AHEAD[name]

    def work(comm: Any) -> list[list[float]]:
        first, found = who % size, []
        for count in COUNTS:
            comm.barrier()
            # The others come when it has made all its calls: if it had to wait, so would they.
            if comm.rank != first:
                comm.recv(np.ones(1), first)
            for number in range(WINDOW - 1):
                result = call(comm, np.full(count, float(number)))
                found.append([] if result is None else np.ravel(result).tolist())
            if comm.rank == first:
                for other in set(range(size)) - {first}:
                    comm.send(np.ones(1), other)
        return found

    def alone(comm: Any) -> list[list[float]]:
        found = []
        for count in COUNTS:
            for number in range(WINDOW - 1):
                comm.barrier()
                result = call(comm, np.full(count, float(number)))
                found.append([] if result is None else np.ravel(result).tolist())
        return found

    assert ranks(size, work) == ranks(size, alone)


@pytest.mark.parametrize("size", [2, 3])
def test_nobody_is_further_ahead_than_the_window(size: int, ranks: Any) -> None:
    def work(comm: Any) -> int:
        made = 0
        comm.barrier()
        if comm.rank:
            time.sleep(1.5)
            return 0
        comm.timeout = 0.5
        for _ in range(2 * WINDOW):
            comm.broadcast(np.ones(1), 0)
            made += 1
        return made

    for found in ranks.outcomes(size, work):
        assert found.error == "CollectiveTimeout", found.trace
        # The barrier was in the same turns, and the call that waits for a place made none.
        assert f"broadcast #{WINDOW + 1} " in found.message or f"#{WINDOW + 2} " in found.message


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("before", [0, 1, WINDOW - 1, WINDOW, 3 * WINDOW])
def test_calls_that_need_nobody_are_compared_a_window_later(
    size: int, before: int, ranks: Any
) -> None:
    """Each is the root of its own broadcasts, so no rank waits for any other to get its data."""

    def work(comm: Any) -> tuple[int, str]:
        made = 0
        with pytest.raises(CollectiveMismatch) as caught:
            for _ in range(before):  # others may differ before this rank has come so far
                comm.broadcast(np.ones(2), 0)
            for _ in range(WINDOW + 2):
                one(comm) if comm.rank else other(comm)
                made += 1
        return made, str(caught.value)

    for made, message in ranks(size, work):
        assert made <= WINDOW + 1
        assert f"broadcast #{before + 1} " in message
        lines = [line for line in message.splitlines() if f"#{before + 1} " in line]
        for line in lines:
            rank = re.match(r"  rank (\d): .* root=\1 ", line)
            assert rank, message
            function = one if int(rank[1]) else other
            assert line.endswith(f"test_window.py:{function.__code__.co_firstlineno + 1}")
        assert len(lines) > 1, message


def one(comm: Any) -> None:
    comm.broadcast(np.ones(2), comm.rank)


def other(comm: Any) -> None:
    comm.broadcast(np.ones(2), comm.rank)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_difference_is_told_by_any_later_call(size: int, ranks: Any) -> None:
    """Ranks that differed long ago and agree again: the hash remembers, and the first is named."""

    def work(comm: Any) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            comm.barrier()
            comm.broadcast(np.ones(1 + (comm.rank > 0)), comm.rank)
            for _ in range(3):
                comm.broadcast(np.ones(1), comm.rank)
            for _ in range(2):
                comm.barrier()
        return str(caught.value)

    for message in ranks(size, work):
        assert "broadcast #2 float64[1] root=0" in message
        assert "broadcast #2 float64[2] root=1" in message


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_small_and_large_calls_gives_what_each_alone_would(
    seed: int, size: int, ranks: Any
) -> None:
    """Ranks run ahead and fall behind at random; every result says which call it belongs to."""

    def work(comm: Any) -> list[str]:
        alike, own, wrong = random.Random(seed), random.Random(f"{seed} {comm.rank}"), []
        for number in range(6 * WINDOW):
            count = alike.choice([0, 1, 6, 7, 8, 100, 134, 135, 136, 2000, 40_000])
            name = alike.choice([*AHEAD, "all_reduce", "barrier", "all_to_all"])
            if own.random() < 0.02:
                time.sleep(0.003)
            base = np.full(count, float(number * size))
            x = base + comm.rank
            due = {
                "broadcast": base,
                "broadcast from the last": base + size - 1,
                "scatter": base,
                "gather": np.stack([base + rank for rank in range(size)]),
                "reduce": base * size + sum(range(size)),
                "scan": base * (comm.rank + 1) + sum(range(comm.rank + 1)),
                "all_reduce": base * size + sum(range(size)),
                "all_to_all": np.stack([base + rank for rank in range(size)]),
            }
            if name == "barrier":
                comm.barrier()
                continue
            if name == "all_reduce":
                found: Any = comm.all_reduce(x)
            elif name == "all_to_all":
                found = comm.all_to_all(np.stack([x] * size))
            else:
                found = AHEAD[name][1](comm, x)
            if name in ("gather", "reduce") and comm.rank != 0:
                continue
            if not np.array_equal(found, due[name]):
                wrong.append(f"{name} of {count}, call {number}")
        return wrong

    assert ranks(size, work) == [[]] * size
