"""What every algorithm promises, checked for every file in the folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import pytest

from roundelay.algorithms import Algorithm, algorithms
from roundelay.errors import InvalidArgumentError, UnknownNameError, UnsupportedSizeError
from roundelay.schedule import Algebra, Cell, Price, Schedule, price, prove, replay

SIZES = range(1, 17)
every_algorithm = pytest.mark.parametrize("name", algorithms.names())
every_size = pytest.mark.parametrize("size", SIZES)

#: Values worth trying, by the name of the option; an option with another name keeps its default.
WORTH_TRYING: Mapping[str, Callable[[int], Sequence[Any]]] = {  # options are of any type
    "direction": lambda _: ["left", "right"],
    "segments": lambda _: [1, 2, 3, 7],
    "group": lambda size: [group for group in range(1, size + 1) if size % group == 0],
    "server": range,
}


def schedules(algorithm: Algorithm, size: int) -> Iterator[Schedule]:
    """Every root (where there is one), then every option, one at a time."""
    for root in range(size if algorithm.collective.rooted else 1):
        yield algorithm.schedule(size, root)
    for option in algorithm.options.keys() & WORTH_TRYING.keys():
        for value in WORTH_TRYING[option](size):
            yield algorithm.schedule(size, size - 1, **{option: value})


@every_size
@every_algorithm
def test_keeps_its_promise_for_every_root_and_option(name: str, size: int) -> None:
    algorithm = algorithms.load(name)
    try:
        found = list(schedules(algorithm, size))
    except UnsupportedSizeError as error:
        assert error.takes
        return
    for schedule in found:
        prove(schedule)  # raises, naming the rank, the chunk and the step
        assert schedule.collective is algorithm.collective
        assert schedule.name == name
        assert all(transfer.src != transfer.dst for transfer in schedule.transfers)
        assert (len(schedule.steps) == 0) == (size == 1)


@every_algorithm
def test_is_the_same_every_time(name: str) -> None:
    algorithm = algorithms.load(name)
    for size in SIZES:
        first, again = algorithm.schedule(size, size - 1), algorithm.schedule(size, size - 1)
        assert (first.transfers, first.parts) == (again.transfers, again.parts)


@every_algorithm
def test_says_what_it_does_and_is_called_after_its_collective(name: str) -> None:
    algorithm = algorithms.load(name)
    assert algorithm.name == algorithm.__name__ == name
    assert algorithm.summary.endswith(".")
    assert name == f"{algorithm.collective.name}_{algorithm.short_name}"


@every_algorithm
def test_refuses_what_is_no_size_or_no_root(name: str) -> None:
    algorithm = algorithms.load(name)
    no_sizes: list[Any] = [0, -1, 1.0, True, "2", None]
    for size in no_sizes:
        with pytest.raises(InvalidArgumentError, match=f"{algorithm.collective.name} needs"):
            algorithm.schedule(size)
    no_roots: list[Any] = [-1, 4, True, 0.0, None]
    for root in no_roots:
        with pytest.raises(InvalidArgumentError, match="root"):
            algorithm.schedule(4, root)


@every_algorithm
def test_refuses_options_it_does_not_have(name: str) -> None:
    with pytest.raises(UnknownNameError, match=f"options of {name} has no 'speed'"):
        algorithms.load(name).schedule(4, speed=2)


@pytest.mark.parametrize(
    ("option", "value"),
    [("direction", "up"), ("segments", 0), ("segments", -1), ("group", 3), ("group", 0),
     ("group", -2), ("server", 4), ("server", -1)],
)  # fmt: skip
def test_refuses_values_that_make_no_sense(option: str, value: Any) -> None:
    having = [algorithm for algorithm in algorithms if option in algorithm.options]
    assert having
    for algorithm in having:
        with pytest.raises(InvalidArgumentError):
            algorithm.schedule(4, **{option: value})


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize(("direction", "away"), [("right", 1), ("left", -1)])
def test_rings_send_to_the_neighbour_they_are_told(direction: str, away: int, size: int) -> None:
    rings = [algorithm for algorithm in algorithms if "direction" in algorithm.options]
    assert rings
    for ring in rings:
        schedule = ring.schedule(size, direction=direction)
        assert all(t.dst == (t.src + away) % size for t in schedule.transfers)


class Form(NamedTuple):
    """A closed form: steps, and the most that a rank sends, in units of the data S."""

    steps: Callable[[int], int]
    sent: Callable[[int], Fraction | int]
    sizes: Sequence[int] = SIZES


def log(size: int) -> int:
    """ceil(log2 size), counted and not computed."""
    steps = 0
    while 2**steps < size:
        steps += 1
    return steps


def some(size: int) -> int:
    """1 if there is anybody to talk to."""
    return 1 if size > 1 else 0


def others(size: int) -> Fraction:
    """(N - 1)/N, the least that all-gather and reduce-scatter can do."""
    return Fraction(size - 1, size)


def largest_subtree(size: int) -> Fraction:
    """What the busiest child of a binomial tree carries, in units of the data."""
    half = 2 ** (log(size) - 1) if size > 1 else 0
    return Fraction(max(size - half, half // 2) if size > 1 else 0, size)


def set_bits(size: int) -> Fraction:
    """The bits in all distances 0 … N-1, over N: how often Bruck moves a block."""
    return Fraction(sum(distance.bit_count() for distance in range(size)), size)


POWERS = (1, 2, 4, 8, 16)
FORMS: Mapping[str, Form] = {
    "all_gather_bruck": Form(log, others),
    "all_gather_direct": Form(some, others),
    "all_gather_recursive_doubling": Form(log, others, POWERS),
    "all_gather_ring": Form(lambda n: n - 1, others),
    "all_reduce_halving_doubling": Form(lambda n: 2 * log(n), lambda n: 2 * others(n), POWERS),
    "all_reduce_one_shot": Form(some, lambda n: n - 1),
    "all_reduce_parameter_server": Form(lambda n: 2 * some(n), lambda n: n - 1),
    "all_reduce_recursive_doubling": Form(log, log, POWERS),
    "all_reduce_ring": Form(lambda n: 2 * (n - 1), lambda n: 2 * others(n)),
    "all_reduce_tree": Form(lambda n: 2 * log(n), log),
    "all_reduce_two_shot": Form(lambda n: 2 * some(n), lambda n: 2 * others(n)),
    "all_to_all_bruck": Form(log, set_bits),
    "all_to_all_direct": Form(some, others),
    "all_to_all_pairwise": Form(lambda n: n - 1, others),
    "barrier_direct": Form(some, lambda _: 0),
    "barrier_dissemination": Form(log, lambda _: 0),
    "barrier_tree": Form(lambda n: 2 * log(n), lambda _: 0),
    "broadcast_binomial": Form(log, log),
    "broadcast_chain": Form(lambda n: (n - 2 + 4) * some(n), some),
    "broadcast_direct": Form(some, lambda n: n - 1),
    "broadcast_scatter_all_gather": Form(lambda n: log(n) + n - 1, lambda n: 2 * others(n)),
    "exscan_chain": Form(lambda n: n - 1, lambda n: min(n - 1, 2)),
    "exscan_direct": Form(lambda n: min(n - 1, 2), lambda n: n - 1),
    "exscan_hillis_steele": Form(
        lambda n: some(n) + log(n - 1), lambda n: some(n) + log(n - 1)
    ),
    "gather_binomial": Form(log, largest_subtree),
    "gather_direct": Form(some, lambda n: Fraction(some(n), n)),
    "reduce_binomial": Form(log, some),
    "reduce_direct": Form(some, some),
    "reduce_scatter_direct": Form(some, others),
    "reduce_scatter_gather": Form(
        lambda n: n - 1 + log(n), lambda n: others(n) + largest_subtree(n)
    ),
    "reduce_scatter_recursive_halving": Form(log, others, POWERS),
    "reduce_scatter_ring": Form(lambda n: n - 1, others),
    "scan_chain": Form(lambda n: n - 1, some),
    "scan_direct": Form(some, lambda n: n - 1),
    "scan_hillis_steele": Form(log, log),
    "scatter_binomial": Form(log, others),
    "scatter_direct": Form(some, others),
}  # fmt: skip


def priced(schedule: Schedule) -> Price:
    """The price of data that divides evenly into all chunks, so that forms hold exactly."""
    per_rank = schedule.collective.per_rank(schedule.size, schedule.root)
    return price(schedule, nbytes=8 * per_rank * schedule.parts)


@pytest.mark.parametrize("name", FORMS)
def test_counts_agree_with_the_closed_form(name: str) -> None:
    form, algorithm = FORMS[name], algorithms.load(name)
    for size in form.sizes:
        for root in range(size if algorithm.collective.rooted else 1):
            cost = priced(algorithm.schedule(size, root))
            assert len(cost.steps) == form.steps(size), f"steps on {size} ranks"
            assert max(cost.sent) == form.sent(size) * cost.nbytes, f"sent on {size} ranks"


@every_size
def test_sizes_that_are_no_power_of_two_cost_two_steps_more(size: int) -> None:
    extra = 0 if size in POWERS else 2
    below = log(size) if size in POWERS else log(size) - 1
    for name, rounds in [
        ("all_gather_recursive_doubling", 1),
        ("reduce_scatter_recursive_halving", 1),
        ("all_reduce_recursive_doubling", 1),
        ("all_reduce_halving_doubling", 2),
    ]:
        assert len(algorithms.load(name).schedule(size).steps) == rounds * below + extra


@every_size
@pytest.mark.parametrize("segments", [1, 2, 3, 8])
def test_a_chain_takes_one_step_more_per_segment(size: int, segments: int) -> None:
    cost = priced(algorithms.load("broadcast_chain").schedule(size, segments=segments))
    assert len(cost.steps) == (size - 2 + segments if size > 1 else 0)
    assert max(cost.sent) == (cost.nbytes if size > 1 else 0)


@every_size
def test_hierarchies_take_as_few_bytes_as_the_ring_in_fewer_steps(size: int) -> None:
    for group in WORTH_TRYING["group"](size):
        hosts = size // group
        cost = priced(algorithms.load("all_reduce_hierarchical").schedule(size, group=group))
        assert len(cost.steps) == 2 * some(group) + 2 * (hosts - 1)
        assert max(cost.sent) == 2 * others(size) * cost.nbytes


@every_size
def test_two_trees_share_the_load(size: int) -> None:
    cost = priced(algorithms.load("all_reduce_double_binary_tree").schedule(size))
    assert len(cost.steps) <= 4 * log(size)
    assert max(cost.sent) <= 2 * cost.nbytes


@every_size
def test_a_parameter_server_is_the_bottleneck(size: int) -> None:
    for server in range(size):
        cost = priced(algorithms.load("all_reduce_parameter_server").schedule(size, server=server))
        for rank in range(size):
            load = (size - 1 if rank == server else 1) * cost.nbytes if size > 1 else 0
            assert (cost.sent[rank], cost.received[rank]) == (load, load)


@every_size
def test_barriers_send_messages_but_no_bytes(size: int) -> None:
    dissemination = priced(algorithms.load("barrier_dissemination").schedule(size))
    tree = priced(algorithms.load("barrier_tree").schedule(size))
    direct = priced(algorithms.load("barrier_direct").schedule(size))
    assert (dissemination.messages, tree.messages) == (size * log(size), 2 * (size - 1))
    assert direct.messages == size * (size - 1)
    assert sum(dissemination.sent) == sum(tree.sent) == sum(direct.sent) == 0


def contributions(schedule: Schedule, *, after: int) -> dict[Cell, list[int]]:
    """Whose contributions every written cell holds after so many steps."""
    held: dict[Cell, list[int]] = {}
    for step in list(replay(schedule, Algebra()))[:after]:
        held.update({write.cell: write.value.leaves() for write in step.writes})
    return held


def test_five_gpus_add_up_around_the_ring() -> None:
    a, b, c, d, e = range(5)
    ring = algorithms.load("all_reduce_ring").schedule(5)

    assert contributions(ring, after=1)[Cell(1, a)] == [0, 1]
    four = contributions(ring, after=4)
    owners = {4: a, 0: b, 1: c, 2: d, 3: e}
    assert all(sorted(four[Cell(rank, chunk)]) == [0, 1, 2, 3, 4] for rank, chunk in owners.items())
    assert sum(len(ranks) == 5 for ranks in four.values()) == 5
    eight = contributions(ring, after=8)
    assert len(eight) == 25
    assert all(sorted(ranks) == [0, 1, 2, 3, 4] for ranks in eight.values())


def test_four_devices_send_to_the_left() -> None:
    schedule = algorithms.load("reduce_scatter_ring").schedule(4, direction="left")
    first = {(t.src, t.dst, t.chunk) for t in schedule.steps[0]}
    assert first == {(rank, (rank - 1) % 4, (rank + 1) % 4) for rank in range(4)}
