"""The planner's seconds are the price of real schedules, in closed form."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.networks import cluster_called, cluster_names
from roundelay.pipelines import StageCosts, pipeline_called, price_pipeline
from roundelay.planning import (
    STRATEGIES,
    Candidate,
    MeshShape,
    PlanChoices,
    Task,
    plan,
    step_time,
    transformer,
)
from roundelay.planning.collective_time import (
    RankGroup,
    all_gather,
    all_reduce,
    group_along,
    one_message,
    reduce_scatter,
)
from roundelay.planning.step_time import messages_in_a_row
from roundelay.schedule import over_hosts, price

H100 = cluster_called("h100-ib")
NBYTES = 4 * 2 * 3 * 4 * 5 * 7 * 8 * 100  # divides by every size below
INNER = {"all_gather": "all_gather_direct", "reduce_scatter": "reduce_scatter_direct"}


def priced(collective: str, hosts: int, inside: int, between: str) -> float:
    """Price a collective over hosts, with another algorithm between them."""
    groups = [range(first, first + inside) for first in range(0, hosts * inside, inside)]
    nested = over_hosts(collectives.load(collective), groups, lanes=inside)
    inner = {**INNER, "all_reduce": between}
    schedule = nested.expand(
        lambda _, call: algorithms.load(inner[call.collective.name]).schedule(len(call.ranks))
    )
    network = replace(H100, per_host=inside).network(hosts * inside)
    return price(schedule, NBYTES, network=network).seconds or 0.0


@pytest.mark.parametrize("inside", [1, 2, 3, 4])
@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 5, 7, 8])
def test_all_reduce_is_the_price_of_the_quicker_schedule(hosts: int, inside: int) -> None:
    ways = ("all_reduce_ring", "all_reduce_halving_doubling")
    quickest = min(priced("all_reduce", hosts, inside, way) for way in ways)
    cluster = replace(H100, per_host=inside)
    found = all_reduce(cluster, RankGroup(inside, hosts), NBYTES)
    assert found == pytest.approx(quickest, rel=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather"])
def test_halves_are_the_price_of_their_schedules(name: str, size: int) -> None:
    function = {"reduce_scatter": reduce_scatter, "all_gather": all_gather}[name]
    inside = algorithms.load(f"{name}_direct").schedule(size)
    assert function(H100, RankGroup(inside=size), NBYTES) == pytest.approx(
        price(inside, NBYTES, network=H100.network(size)).seconds, rel=1e-6
    )
    alone = replace(H100, per_host=1)
    ring = price(algorithms.load(f"{name}_ring").schedule(size), NBYTES,
                 network=alone.network(size)).seconds  # fmt: skip
    found = function(alone, RankGroup(hosts=size), NBYTES)
    assert found <= (ring or 0) * (1 + 1e-6)
    if size in (1, 2, 3):  # a ring is the quickest, or the only one
        assert found == pytest.approx(ring, rel=1e-6)


@pytest.mark.parametrize("hosts", [2, 3, 8, 100])
@pytest.mark.parametrize("inside", [1, 2, 8])
def test_halves_make_the_whole(hosts: int, inside: int) -> None:
    group = RankGroup(inside, hosts)
    halves = reduce_scatter(H100, group, NBYTES) + all_gather(H100, group, NBYTES)
    assert all_reduce(H100, group, NBYTES) == halves


def test_groups_that_share_a_card_slow_each_other_down() -> None:
    """Eight groups of a rank of every host each are one with an eighth of the card."""
    shared = group_along(H100, 16, 8)
    assert shared == RankGroup(inside=1, hosts=16, sharing=8)
    alone = replace(H100, nic_bandwidth=H100.nic_bandwidth / 8)
    assert all_reduce(H100, shared, NBYTES) == pytest.approx(
        all_reduce(alone, RankGroup(hosts=16), NBYTES)
    )
    message = one_message(H100, shared, NBYTES)
    assert message == pytest.approx(
        H100.latency + H100.nic_latency + 8 * NBYTES / H100.nic_bandwidth
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_pipelines_are_the_price_of_1f1b(stages: int, times: int) -> None:
    count, message = stages * times, 0.25
    schedule = pipeline_called("1f1b")(stages, count)
    makespan = price_pipeline(schedule, StageCosts(1, 1, 1), transfer=message).makespan
    waits = messages_in_a_row(stages, count) * message
    assert makespan == pytest.approx((count + stages - 1) * 3 + waits)
    other = price_pipeline(pipeline_called("1f1b")(stages, count + 1), transfer=message).makespan
    assert other <= (count + stages) * 3 + messages_in_a_row(stages, count + 1) * message + 1e-9


def seven(gpus: int, **options: int) -> Task:
    model = transformer(params=7_500_000_000, layers=32, hidden=4096)
    given: dict[str, Any] = {"memory": 80 * 10**9, "batch": 4096, "sequence": 2048, **options}
    return Task(model, H100, gpus, **given)


@pytest.mark.parametrize("mesh", [MeshShape(dp=64), MeshShape(4, 4, 2, 2), MeshShape(1, 8, 1, 8)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_is_the_sum_of_its_parts(strategy: str, mesh: MeshShape) -> None:
    found = step_time(seven(64), Candidate(strategy, "bf16", mesh, 4, "full"))
    parts = (found.forward, found.backward, found.recompute, found.update, found.bubble,
             found.data, found.tensor, found.context, found.pipeline)  # fmt: skip
    assert found.total == pytest.approx(sum(parts))
    assert min(*parts, found.hidden) >= 0
    assert 0 <= found.share < 1
    # One device would compute 8 operations for each parameter and token, and attention.
    tokens = 4096 * 2048
    assert found.forward * 64 * 0.4 * 989e12 > 2 * 7.5e9 * tokens


@pytest.mark.parametrize("size", [2, 3, 4, 7, 64])
def test_zero_3_sends_half_as_much_again(size: int) -> None:
    """With one micro-batch: 2Ψ(N-1)/N for all others, 3Ψ(N-1)/N for ZeRO-3."""
    asked = seven(size, batch=size)
    sent = {name: step_time(asked, Candidate(name, "bf16", MeshShape(dp=size), 1)).sent
            for name in STRATEGIES}  # fmt: skip
    assert sent["ddp"] == sent["zero1"] == sent["zero2"] == 4 * 7.5e9 * (size - 1) / size
    assert sent["zero3"] == 1.5 * sent["ddp"]


def test_the_best_is_the_quickest_that_fits() -> None:
    found = plan(seven(64), PlanChoices(precisions=("bf16", "fp32")))
    assert found.best is not None
    assert found.best.fits
    quickest = min(one.time.total for one in found.options if one.fits)
    assert found.best.time.total == pytest.approx(quickest, rel=1e-3)
    assert all(one.candidate.mesh.size == 64 for one in found.options)
    assert {one.candidate.strategy for one in found.options} == set(STRATEGIES)


def test_faster_networks_and_gpus_never_slow_a_step_down() -> None:
    slow = seven(64)
    quick = replace(slow, cluster=replace(H100, bandwidth=9e11, nic_bandwidth=8e11))
    strong = replace(slow, mfu=0.8)
    for one in plan(slow).options:
        assert step_time(quick, one.candidate).total <= one.time.total * (1 + 1e-12)
        assert step_time(strong, one.candidate).total <= one.time.total * (1 + 1e-12)


def test_a_hundred_thousand_ranks() -> None:
    """All of it in closed form: what counts is that it ends, in seconds and not in hours."""
    model = transformer(params=405_000_000_000, layers=126, hidden=16384)
    began = time.process_time()
    found = plan(Task(model, H100, 100_000, 80 * 10**9, batch=100_000, sequence=8192))
    assert time.process_time() - began < 60
    assert found.best is not None
    assert found.best.candidate.mesh.size == 100_000


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_has_a_source_and_a_network(name: str) -> None:
    cluster = cluster_called(name)
    assert cluster.name == name
    assert "data sheet" in cluster.source
    assert cluster.flops
    assert cluster.memory
    for size in (1, 2, cluster.per_host, cluster.per_host + 3):
        assert cluster.network(size).size == size
