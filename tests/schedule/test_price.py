"""Prices are counts: checked against the transfers themselves and against the textbook."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.algorithms import algorithms
from roundelay.errors import InvalidArgumentError
from roundelay.networks import networks
from roundelay.schedule import Link, Network, Price, Schedule, price

every_algorithm = pytest.mark.parametrize("name", algorithms.names())

ALPHA, BETA, GAMMA = 3e-6, 1 / 10e9, 1 / 40e9


def textbook(size: int) -> Network:
    return networks.load("switch")(
        size, latency=ALPHA, bandwidth=1 / BETA, reduce_bandwidth=1 / GAMMA
    )


def chunk_bytes(schedule: Schedule, elements: int, itemsize: int) -> list[int]:
    """Cut elements into chunks by dealing them out, one after the other."""
    if schedule.collective.idempotent:
        return [0] * schedule.chunks
    per_rank = schedule.collective.per_rank(schedule.size, schedule.root)
    blocks = [sum(e % per_rank == block for e in range(elements)) for block in range(per_rank)]
    parts = schedule.parts
    return [
        itemsize * sum(e % parts == chunk % parts for e in range(blocks[chunk // parts % per_rank]))
        for chunk in range(schedule.chunks)
    ]


def slow_price(
    schedule: Schedule, elements: int, itemsize: int, network: Network | None = None
) -> tuple[list[int], list[tuple[int, int, float]], dict[Link, int]]:
    """Count again, one step and one message at a time."""
    lengths = chunk_bytes(schedule, elements, itemsize)
    sent, steps = [0] * schedule.size, []
    total: dict[Link, int] = defaultdict(int)
    for number in range(len(schedule.steps)):
        now = [t for t in schedule.transfers if t.step == number]
        pairs = sorted({(t.src, t.dst) for t in now})
        nbytes = {p: sum(lengths[t.chunk] for t in now if (t.src, t.dst) == p) for p in pairs}
        folded = [
            sum(lengths[t.chunk] for t in now if t.dst == rank and t.op == "reduce")
            for rank in range(schedule.size)
        ]
        for src, dst in pairs:
            sent[src] += nbytes[src, dst]
        seconds = 0.0
        if network is not None:
            routes = {pair: network.route(*pair) for pair in pairs}
            load: dict[Link, int] = defaultdict(int)
            for pair in pairs:
                for link in routes[pair]:
                    load[link] += nbytes[pair]
                    total[link] += nbytes[pair]
            seconds = max(folded) / network.reduce_bandwidth + max(
                sum(link.latency for link in route)
                + max(load[link] / link.bandwidth for link in route)
                for route in routes.values()
            )
        steps.append((len(pairs), sum(nbytes.values()), seconds))
    return sent, steps, total


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@every_algorithm
def test_counts_what_the_transfers_say(name: str, size: int) -> None:
    schedule = algorithms.load(name).schedule(size, root=size - 1)
    for elements, itemsize in [(0, 4), (1, 4), (size, 8), (53, 1), (120, 2)]:
        cost = price(schedule, elements * itemsize, itemsize=itemsize)
        sent, steps, _ = slow_price(schedule, elements, itemsize)
        assert list(cost.sent) == sent
        assert [(step.messages, step.nbytes) for step in cost.steps] == [s[:2] for s in steps]
        assert sum(cost.sent) == sum(cost.received) == sum(step.nbytes for step in cost.steps)
        assert cost.messages == sum(step[0] for step in steps)
        assert cost.seconds is None and cost.network is None and not cost.links
        assert all(step.seconds is None for step in cost.steps)


@pytest.mark.parametrize("network_name", networks.names())
@every_algorithm
def test_seconds_and_loads_follow_the_model_on_every_network(name: str, network_name: str) -> None:
    schedule = algorithms.load(name).schedule(6, root=2)
    network = networks.load(network_name)(6)
    cost = price(schedule, 53 * 4, network=network)
    _, steps, total = slow_price(schedule, 53, 4, network)
    assert [step.seconds for step in cost.steps] == pytest.approx([step[2] for step in steps])
    assert cost.seconds == pytest.approx(sum(step[2] for step in steps))
    assert cost.links == total
    assert cost.network == network_name


@given(st.integers(2, 12), st.integers(0, 10**9))
def test_seconds_are_the_textbooks_on_a_switch(size: int, each: int) -> None:
    nbytes = 4 * size * each
    log = (size - 1).bit_length()

    def seconds(name: str) -> float | None:
        cost: Price = price(algorithms.load(name).schedule(size), nbytes, network=textbook(size))
        return cost.seconds

    hop = ALPHA + nbytes / size * BETA
    fold = (size - 1) * nbytes / size * GAMMA
    assert seconds("all_reduce_ring") == pytest.approx(2 * (size - 1) * hop + fold)
    assert seconds("reduce_scatter_ring") == pytest.approx((size - 1) * hop + fold)
    assert seconds("broadcast_binomial") == pytest.approx(log * (ALPHA + nbytes * BETA))
    star = ALPHA + (size - 1) * nbytes * BETA
    assert seconds("all_reduce_parameter_server") == pytest.approx(
        2 * star + (size - 1) * nbytes * GAMMA
    )
    assert seconds("barrier_dissemination") == pytest.approx(log * ALPHA)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
@every_algorithm
def test_a_port_carries_what_its_rank_sends_and_receives(name: str, size: int) -> None:
    cost = price(algorithms.load(name).schedule(size), 4096, network=textbook(size))
    out = {link.src: nbytes for link, nbytes in cost.links.items() if link.dst == "switch"}
    into = {link.dst: nbytes for link, nbytes in cost.links.items() if link.src == "switch"}
    assert [out.get(rank, 0) for rank in range(size)] == list(cost.sent)
    assert [into.get(rank, 0) for rank in range(size)] == list(cost.received)


@pytest.mark.parametrize(("direction", "away"), [("right", 1), ("left", -1)])
def test_a_ring_on_a_ring_loads_every_link_alike(direction: str, away: int) -> None:
    schedule = algorithms.load("all_reduce_ring").schedule(8, direction=direction)
    cost = price(schedule, 4096, network=networks.load("ring")(8))
    assert {(link.src, link.dst) for link in cost.links} == {
        (rank, (rank + away) % 8) for rank in range(8)
    }
    assert set(cost.links.values()) == {2 * 7 * 4096 // 8}


def test_a_larger_network_costs_the_same() -> None:
    schedule = algorithms.load("all_reduce_ring").schedule(5)
    assert price(schedule, 4000, network=textbook(9)) == price(schedule, 4000, network=textbook(5))


@pytest.mark.parametrize(
    ("nbytes", "itemsize", "word"),
    [(-4, 4, "nbytes"), (6, 4, "multiple"), (4.0, 4, "nbytes"), (True, 1, "nbytes"),
     (10**400, 4, "nbytes"), (4, 0, "itemsize"), (4, -1, "itemsize"), (4, 1.0, "itemsize"),
     ("4", 4, "nbytes")],
)  # fmt: skip
def test_refuses_what_is_no_number_of_bytes(nbytes: Any, itemsize: Any, word: str) -> None:
    with pytest.raises(InvalidArgumentError, match=word):
        price(algorithms.load("all_reduce_ring").schedule(2), nbytes, itemsize=itemsize)


def test_refuses_a_network_that_is_too_small() -> None:
    schedule = algorithms.load("all_reduce_ring").schedule(5)
    with pytest.raises(
        InvalidArgumentError, match=r"all_reduce_ring runs on 5 .* switch .* only 4"
    ):
        price(schedule, network=textbook(4))


def test_pricing_the_ring_for_256_ranks_takes_less_than_a_second() -> None:
    schedule = algorithms.load("all_reduce_ring").schedule(256)
    for network in (None, textbook(256)):
        begun = time.process_time()
        cost = price(schedule, network=network)
        assert time.process_time() - begun < 1
        assert (len(cost.steps), cost.messages) == (2 * 255, 2 * 255 * 256)
