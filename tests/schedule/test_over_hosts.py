"""Every collective over hosts: proved for any hosts, whatever algorithm carries a phase."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.errors import InvalidArgumentError, UnsupportedSizeError
from roundelay.networks import networks
from roundelay.schedule import (
    Axis,
    NestedCall,
    NestedSchedule,
    Schedule,
    find_failures,
    lanes_for,
    over_hosts,
    price,
    prove,
)
from roundelay.tuning import DEFAULT

Hosts = tuple[tuple[int, ...], ...]

#: Dealt out in another order than host by host.
DEALT: list[Hosts] = [
    ((3, 0, 4), (1, 2)),
    ((0, 2), (1,)),
    ((1, 3), (0, 2)),
    ((0, 2, 5), (1, 4), (3,)),
]


def filled(lengths: tuple[int, ...]) -> Hosts:
    """Number ranks host by host."""
    ranks = iter(range(sum(lengths)))
    return tuple(tuple(itertools.islice(ranks, length)) for length in lengths)


def every_hosts() -> Iterator[Hosts]:
    for count in (1, 2, 3):
        yield from map(filled, itertools.product(range(1, 5), repeat=count))
    yield from DEALT


EVERY = list(every_hosts())


def plans(hosts: Hosts) -> Iterator[NestedSchedule]:
    """Every collective, with one lane and with all, from every root."""
    size = sum(map(len, hosts))
    for collective in collectives:
        for lanes in sorted({1, min(map(len, hosts))}):
            for root in range(size) if collective.rooted else (0,):
                yield over_hosts(collective, hosts, root, lanes=lanes)


def by_default(_: Axis, call: NestedCall) -> Schedule:
    name = DEFAULT.choose(call.collective.name, 1 << 20)
    return algorithms.load(name).schedule(len(call.ranks), call.root)


@pytest.mark.parametrize("hosts", EVERY, ids=str)
def test_every_plan_is_proved(hosts: Hosts) -> None:
    for nested in plans(hosts):
        schedule = nested.expand(by_default)
        assert find_failures(schedule) == []
        # Host by host, sums are those of neighbours: fit for reductions that do not commute.
        if hosts == filled(tuple(map(len, hosts))) and not nested.collective.idempotent:
            assert prove(schedule).order != "any"


@pytest.mark.parametrize("hosts", [filled((2, 2)), filled((3, 2)), DEALT[0], DEALT[1]], ids=str)
@pytest.mark.parametrize("name", algorithms.names())
def test_any_algorithm_carries_a_phase(name: str, hosts: Hosts) -> None:
    chosen = algorithms.load(name)

    def inner(axis: Axis, call: NestedCall) -> Schedule:
        if call.collective is chosen.collective:
            try:
                return chosen.schedule(len(call.ranks), call.root)
            except UnsupportedSizeError:
                pass
        return by_default(axis, call)

    used = 0
    for nested in plans(hosts):
        if chosen.collective in {call.collective for each in nested.phases for call in each.calls}:
            assert find_failures(nested.expand(inner)) == []
            used += 1
    assert used


@pytest.mark.parametrize("hosts", EVERY, ids=str)
def test_phases_keep_to_their_axis(hosts: Hosts) -> None:
    home = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    for nested in plans(hosts):
        for phase in nested.phases:
            ranks = [rank for call in phase.calls for rank in call.ranks]
            assert len(ranks) == len(set(ranks))
            for call in phase.calls:
                found = [home[rank] for rank in call.ranks]
                assert len(call.blocks) == call.collective.blocks(len(call.ranks))
                if phase.axis == "inside":
                    assert call.ranks == hosts[found[0]]
                elif phase.axis == "lane":
                    assert found == list(range(len(hosts)))
                    assert len({hosts[home[rank]].index(rank) for rank in call.ranks}) == 1
        # Hosts compare their calls in the first lane, so every plan goes there or to everyone.
        if len(hosts) > 1:
            first = next(phase for phase in nested.phases if phase.axis != "inside")
            assert first.axis == "everyone" or first.call_of(hosts[0][0]) is not None


@pytest.mark.parametrize("lengths", [(4, 4), (2, 2, 2), (3, 1)])
def test_between_hosts_every_byte_travels_once(lengths: tuple[int, ...]) -> None:
    """What moves only: no card of a host carries more than what others need of it."""
    hosts, nbytes = filled(lengths), 3 * 4 * 1024
    size = sum(lengths)
    network = networks.load("hosts")(size, per_host=lengths)
    for name, most in {
        "all_gather": nbytes * max(lengths) * (len(lengths) - 1) // size,
        "broadcast": nbytes * (len(lengths) - 1),
        "gather": nbytes * max(lengths[1:]) // size,
    }.items():
        nested = over_hosts(collectives.load(name), hosts, lanes=min(lengths))
        cost = price(nested.expand(by_default), nbytes, network=network)
        cards = {link: load for link, load in cost.links.items() if link.dst == "network"}
        assert len(cards) <= len(lengths)
        assert max(cards.values()) == most


def test_small_calls_take_one_lane() -> None:
    hosts = filled((4, 3))
    assert lanes_for(hosts, 32 * 1024) == 1
    assert lanes_for(hosts, 32 * 1024 + 1) == 3


@pytest.mark.parametrize(
    ("hosts", "lanes", "told"),
    [
        (((0, 1), ()), 1, "a rank on every host"),
        (((0, 1), (1, 2)), 1, "every rank from 0 on one host"),
        (((0, 1), (2,)), 2, "1 to 1 lanes, not 2"),
        (((0, 1), (2, 3)), 0, "1 to 2 lanes, not 0"),
    ],
)
def test_hosts_that_can_not_be_are_refused(hosts: Hosts, lanes: int, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        over_hosts(collectives.load("all_gather"), hosts, lanes=lanes)
