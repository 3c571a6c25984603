"""The two-level walk gives what the expanded schedule gives, bit for bit; ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.algorithms import algorithms
from roundelay.collectives import Collective, collectives
from roundelay.engines import run_schedule
from roundelay.engines.hierarchical import Hierarchical
from roundelay.engines.hierarchical import _calls as walked
from roundelay.rendezvous.topology import HostTopology
from roundelay.schedule import Axis, NestedCall, Schedule, over_hosts
from roundelay.tuning import DEFAULT

Hosts = tuple[tuple[int, ...], ...]

HOSTS: list[Hosts] = [
    ((0, 1),),
    ((0,), (1,)),
    ((0, 1), (2, 3)),
    ((0, 1, 2), (3,)),
    ((0,), (1, 2, 3, 4)),
    ((0, 1, 2), (3, 4)),
    ((0, 1, 2, 3), (4, 5, 6, 7)),
    ((0, 2), (1,)),
    ((0,), (1,), (2,)),
    ((0, 1), (2, 3), (4, 5)),
    ((0, 1, 2, 3), (4, 5), (6, 7, 8)),
    ((0, 3), (1, 4, 6), (2, 5)),
]
COUNTS = (0, 1, 23)  # elements of a block


def inner(_: Axis, call: NestedCall) -> Schedule:
    name = DEFAULT.choose(call.collective.name, 1 << 20)
    return algorithms.load(name).schedule(len(call.ranks), call.root)


def on_hosts(hosts: Hosts, work: Callable[[rd.Communicator], Any]) -> list[Any]:
    """Run `work` on threads as ranks of these hosts: one engine of threads is both levels."""

    def body(whole: rd.Communicator) -> Any:
        everyone = whole._engine
        places = HostTopology(hosts, whole.rank)
        inside = None
        for there in hosts:  # every rank makes every group
            made = everyone.group(there)
            inside = made or inside
        assert inside is not None
        engine = Hierarchical(places, inside, everyone if len(hosts) > 1 else None)
        return work(rd.Communicator(engine))

    return rd.run(body, sum(map(len, hosts)), engine="threads")


def given(collective: Collective, size: int, root: int, rank: int, count: int) -> Any:
    """Return floats whose sum depends on the order of addition."""
    blocks = len(list(collective.before(size, root, rank)))
    rng = np.random.default_rng([rank, count])
    return (rng.standard_normal(blocks * count) * 10.0 ** rng.integers(-6, 6)).astype(np.float32)


def call(comm: rd.Communicator, name: str, root: int, count: int, op: str) -> Any:
    collective = collectives.load(name)
    x = given(collective, comm.size, root, comm.rank, count)
    blocks = len(list(collective.before(comm.size, root, comm.rank)))
    rows = x.reshape(blocks, count) if blocks > 1 else x
    if name == "barrier":
        return comm.barrier()
    if name == "broadcast":
        return comm.broadcast(x if comm.rank == root else np.zeros(count, np.float32), root)
    if name == "scatter":
        return comm.scatter(rows if comm.rank == root else None, root)
    arguments: list[Any] = [op] if collective.reduces else []
    arguments += [root] if collective.rooted else []
    return getattr(comm, name)(rows.copy(), *arguments)


def cases(size: int) -> list[tuple[str, int, int, str]]:
    return [
        (collective.name, root, count, op)
        for collective in collectives
        for count in COUNTS
        for root in (range(size) if collective.rooted else (0,))
        for op in (("sum", "max", "avg") if collective.reduces else ("sum",))
        if op != "avg" or collective.name not in ("scan", "exscan")
        if collective.name != "barrier" or op == "sum"
    ]


@pytest.mark.parametrize("one_lane", [True, False])
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_the_walk_has_the_bits_of_the_schedule(
    hosts: Hosts, *, one_lane: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = 1 if one_lane else min(map(len, hosts))
    monkeypatch.setattr(walked, "lanes_for", lambda *_: lanes)
    size = sum(map(len, hosts))
    found = on_hosts(hosts, lambda comm: [call(comm, *case) for case in cases(size)])
    compared = 0
    for number, (name, root, count, op) in enumerate(cases(size)):
        collective = collectives.load(name)
        if collective.idempotent:
            continue
        if len(hosts) > 1:
            schedule = over_hosts(collective, hosts, root, lanes=lanes).expand(inner)
        else:  # shared memory alone
            schedule = inner("inside", NestedCall(collective, hosts[0], (), root))
        inputs = [given(collective, size, root, rank, count) for rank in range(size)]
        due = run_schedule(schedule, inputs, op=op)
        for rank in range(size):
            if due[rank] is not None:
                mine = np.ravel(found[rank][number])
                np.testing.assert_array_equal(mine, due[rank], f"{name} {root} {count} {op} {rank}")
                compared += 1
    assert compared > len(COUNTS) * size * 6
