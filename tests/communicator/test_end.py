"""The end of a job compares: what no call has noticed, the end of all calls does, on every rank."""

from __future__ import annotations

import gc
import os
import random
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from roundelay.errors import CollectiveMismatch, CollectiveTimeout

Call = Callable[[Any, int, int], object]
SIZES = [2, 3, 4, 7]

#: Calls with a root and without, of so many elements; several need no other rank to return.
ROOTED: dict[str, Call] = {
    "broadcast": lambda c, root, n: c.broadcast(np.ones(n), root),
    "reduce": lambda c, root, n: c.reduce(np.ones(n), root=root),
    "gather": lambda c, root, n: c.gather(np.ones(n), root),
    "scatter": lambda c, root, n: c.scatter(np.ones((c.size, n)), root, out=np.ones(n)),
}
COUNTED: dict[str, Call] = {
    **ROOTED,
    "all_reduce": lambda c, _, n: c.all_reduce(np.ones(n)),
    "all_gather": lambda c, _, n: c.all_gather(np.ones(n)),
    "reduce_scatter": lambda c, _, n: c.reduce_scatter(np.ones((c.size, n))),
    "all_to_all": lambda c, _, n: c.all_to_all(np.ones((c.size, n))),
    "scan": lambda c, _, n: c.scan(np.ones(n)),
    "exscan": lambda c, _, n: c.exscan(np.ones(n)),
    "in the background": lambda c, root, n: c.start.broadcast(np.ones(n), (root + 1) % c.size),
}
CALLS: dict[str, Call] = {
    **COUNTED,
    "barrier": lambda c, *_: c.barrier(),
    "nothing": lambda *_: None,
}
COUNTS = [1, 3, 1000, 70_000]


def mismatch(seed: int, size: int) -> Callable[[Any], None]:
    """Return work that ends in a call that differs between ranks, now and then in a group."""
    chance = random.Random(seed)
    before, grouped = chance.randrange(4), chance.random() < 0.4
    odd = chance.sample(range(size), chance.randint(1, size - 1))
    differs = chance.choice(["name", "root", "count"])
    names = sorted({"name": CALLS, "root": ROOTED, "count": COUNTED}[differs])
    name, other_name = chance.sample(names, 2)
    root, other_root = chance.sample(range(size), 2)
    count, other_count = chance.sample(COUNTS, 2)
    usual = name, root, count
    other = {
        "name": (other_name, root, count),
        "root": (name, other_root, count),
        "count": (name, root, other_count),
    }[differs]

    def work(comm: Any) -> None:
        group = comm.split(0, key=-comm.rank) if grouped else comm
        for _ in range(before):
            group.all_reduce(np.ones(3))
        called, *given = other if comm.rank in odd else usual
        CALLS[called](group, *given)

    return work


#: More of them by hand: ROUNDELAY_MISMATCHES=200 pytest tests/communicator/test_end.py -k random
ROUNDS = int(os.environ.get("ROUNDELAY_MISMATCHES", "8"))


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_random_last_calls_that_differ_are_told_on_every_rank(seed: int, ranks: Any) -> None:
    size = SIZES[seed % len(SIZES)]
    found = ranks.outcomes(size, mismatch(seed, size), timeout=20)
    assert [one.error for one in found] == ["CollectiveMismatch"] * size, [
        (one.error, one.message) for one in found
    ]
    for one in found:
        lines = one.message.splitlines()[1:]
        named = sorted(int(n) for line in lines for n in re.findall(r"\d+", line.split(":")[0]))
        assert named == list(range(size)), one.message


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("where", ["all", "group", "closed group", "dropped group"])
def test_each_its_own_root_is_told(where: str, size: int, ranks: Any) -> None:
    """No rank waits for another, so nobody else would ever notice."""

    def work(comm: Any) -> None:
        group = comm if where == "all" else comm.split(0)
        group.broadcast(np.ones(3), comm.rank)
        if where == "closed group":
            group.close()
        del group
        gc.collect()

    for found in ranks.outcomes(size, work):
        assert found.error == "CollectiveMismatch", found.trace
        for rank in range(size):
            assert f"rank {rank}: broadcast #1 float64[3] root={rank}" in found.message
        assert ("in group" in found.message) == (where != "all")
        assert "test_end.py:" in found.message


@pytest.mark.parametrize("size", SIZES)
def test_ranks_outside_of_a_group_hear_of_it_too(size: int, ranks: Any) -> None:
    def work(comm: Any) -> None:
        pair = comm.group([0, 1])
        if pair is not None:
            pair.broadcast(np.ones(3), comm.rank)

    for found in ranks.outcomes(size, work):
        assert found.error == "CollectiveMismatch", found.trace
        assert re.search(r"in group \d+ \(ranks 0, 1; made at .*test_end\.py:\d+\)", found.message)


@pytest.mark.parametrize("size", SIZES)
def test_right_programs_end_well_whatever_they_leave_open(size: int, ranks: Any) -> None:
    def work(comm: Any) -> int:
        kept = [comm.split(comm.rank % 2), comm.split(0), comm.group([size - 1, 0])]
        for turn, group in enumerate(kept):
            if group is not None:
                group.broadcast(np.ones(3), turn % group.size)
        if comm.rank % 2:
            del kept[0]
        else:
            kept[0].close()
        comm.reduce(np.ones(3), root=size - 1)
        time.sleep(0.02 * comm.rank)
        if comm.rank == 0:
            comm.close()
        return size

    assert ranks(size, work) == [size] * size


def test_closing_waits_no_longer_than_the_timeout_for_who_is_busy(ranks: Any) -> None:
    def work(comm: Any) -> None:
        comm.barrier()  # all are there, however long a busy machine takes to start them
        comm._engine.timeout = 0.2
        if comm.rank == 0:
            time.sleep(1.0)

    ranks(3, work)


def test_who_ends_late_is_still_compared(ranks: Any) -> None:
    def work(comm: Any) -> None:
        comm.broadcast(np.ones(3), comm.rank)
        if comm.rank == 0:
            time.sleep(0.6)

    found = ranks.outcomes(2, work, timeout=0.2)
    assert found[0].error == "CollectiveMismatch", found


def test_an_error_that_was_raised_is_not_raised_again(ranks: Any) -> None:
    def work(comm: Any) -> None:
        with pytest.raises(CollectiveMismatch):
            comm.all_reduce(np.ones(1 + comm.rank))

    ranks(3, work)


def test_an_error_in_the_background_that_nobody_waited_for_is_raised(ranks: Any) -> None:
    def work(comm: Any) -> None:
        comm.start.all_reduce(np.ones(1 + comm.rank))

    assert [one.error for one in ranks.outcomes(2, work)] == ["CollectiveMismatch"] * 2


def test_who_has_ended_hears_how_others_fail(ranks: Any) -> None:
    def work(comm: Any) -> None:
        if comm.rank == 1:
            time.sleep(0.1)
            raise LookupError("no such layer")

    found = ranks.outcomes(3, work)
    assert [one.error for one in found] == ["PeerLost", "LookupError", "PeerLost"]
    assert "Rank 1 failed: LookupError: no such layer" in found[2].message


def test_messages_that_nobody_received_are_told(ranks: Any, capfd: Any) -> None:
    def work(comm: Any) -> None:
        if comm.rank == 0:
            comm.send(np.ones(3), 1, 7)
        else:
            comm.start.recv(np.ones(2), 0, 9)
        comm.barrier()

    ranks(2, work)
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert "rank 1 ended with messages that it never received: from rank 0, tag 7, 24" in told
    assert re.search(r"no message came: from rank 0, tag 9, 16 .* at .*test_end\.py:\d+\.", told)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_circle_of_receives_is_shown(size: int, ranks: Any) -> None:
    def work(comm: Any) -> str:
        with pytest.raises(CollectiveTimeout) as caught:
            comm.recv(np.ones(1), (comm.rank + 1) % size, 5)
        return str(caught.value)

    for message in ranks(size, work, timeout=2):
        assert "They wait in a circle: " in message
        for rank in range(size):
            assert f"rank {rank} waits for rank {(rank + 1) % size}" in message
            line = rf"rank {rank}: recv from rank {(rank + 1) % size}, tag 5, at .*test_end\.py:\d+"
            assert re.search(line, message)


def test_groups_used_in_different_order_are_shown(ranks: Any) -> None:
    def work(comm: Any) -> str:
        groups = comm.split(0), comm.split(0)
        with pytest.raises(CollectiveTimeout) as caught:
            for group in groups if comm.rank == 0 else groups[::-1]:
                group.barrier()
        return str(caught.value)

    for message in ranks(2, work, timeout=2):
        assert "rank 0 waits for rank 1, rank 1 waits for rank 0" in message
        for rank in range(2):
            where = rf"rank {rank}: barrier #1 .* in group {rank + 1} \(ranks 0, 1; made at .*_end"
            assert re.search(where, message)


def test_waiting_for_oneself_and_file_names_are_told_as_they_are(ranks: Any) -> None:
    source = compile("def work(comm):\n    comm.recv(bytearray(3), 0)\n", "/My/Train.py", "exec")
    made: dict[str, Any] = {}
    exec(source, made)
    (found,) = ranks.outcomes(1, made["work"], timeout=0.2)
    assert found.error == "CollectiveTimeout"
    assert "Rank 0 waited 0.2 s for a message from itself." in found.message
    assert "rank 0: recv from itself, tag 0, at /My/Train.py:2" in found.message


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("other", ["members", "order", "length"])
def test_groups_of_different_ranks_are_told_on_every_rank(
    other: str, size: int, ranks: Any
) -> None:
    lists = {"members": [size - 1], "order": [1, 0], "length": [0]}
    usual = [0] if other == "members" else [0, 1]

    def work(comm: Any) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            comm.group(lists[other] if comm.rank == size - 1 else usual)
        assert comm.all_reduce(np.ones(1)) == size
        return str(caught.value)

    for message in ranks(size, work):
        for rank in range(size):
            due = lists[other] if rank == size - 1 else usual
            assert f"rank {rank}: {due}" in message
