"""Composing: laws that hold for any transfers, and contracts that hold for composed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.schedule import (
    Schedule,
    Transfer,
    nest,
    parallel,
    pipeline,
    prove,
    refine,
    relabel,
    sequence,
    shift,
)  # fmt: skip

transfers = st.lists(
    st.builds(
        Transfer, st.integers(0, 4), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5),
        st.sampled_from(["copy", "reduce"]),
    ),
    max_size=8,
)  # fmt: skip


def length(phase: list[Transfer]) -> int:
    return max((t.step + 1 for t in phase), default=0)


@given(transfers, transfers, transfers)
def test_sequences_nest_and_last_as_long_as_their_phases(
    a: list[Transfer], b: list[Transfer], c: list[Transfer]
) -> None:
    whole = list(sequence(a, b, c))
    assert whole == list(sequence(sequence(a, b), c)) == list(sequence(a, sequence(b, c)))
    assert whole == list(sequence(a, [], b, [], c))
    assert length(whole) == length(a) + length(b) + length(c)
    assert [t._replace(step=0) for t in whole] == [t._replace(step=0) for t in [*a, *b, *c]]
    assert list(sequence(a)) == a


@given(transfers, transfers)
def test_parallel_phases_begin_together(a: list[Transfer], b: list[Transfer]) -> None:
    assert list(parallel(a, b)) == a + b
    assert length(list(parallel(a, b))) == max(length(a), length(b))


@given(transfers, st.permutations(range(6)))
def test_relabelling_there_and_back_changes_nothing(some: list[Transfer], ranks: list[int]) -> None:
    back = [ranks.index(rank) for rank in range(6)]
    there = relabel(some, ranks=ranks, chunks=lambda chunk: ranks[chunk])
    assert list(relabel(there, ranks=back, chunks=lambda chunk: back[chunk])) == some
    assert list(relabel(some)) == some
    assert list(relabel(some, ranks=dict(enumerate(ranks)))) == list(relabel(some, ranks=ranks))


@given(transfers, st.integers(1, 4), st.integers(1, 4))
def test_cutting_twice_is_cutting_once(some: list[Transfer], a: int, b: int) -> None:
    assert Counter(refine(refine(some, a), b)) == Counter(refine(some, a * b))
    assert list(refine(some, 1)) == list(pipeline(some, 1)) == some
    assert len(list(pipeline(some, a))) == len(list(refine(some, a))) == a * len(some)


@given(transfers, st.integers(1, 5))
def test_a_pipeline_is_the_same_cut_with_every_segment_one_step_later(
    some: list[Transfer], segments: int
) -> None:
    late = [t._replace(step=t.step + t.chunk % segments) for t in refine(some, segments)]
    assert list(pipeline(some, segments)) == late
    assert length(late) == (length(some) + segments - 1 if some else 0)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("by", range(1, 4))
def test_a_shift_moves_everything_up(size: int, by: int) -> None:
    moved = list(shift(size, by=by, chunks=range(3)))
    assert {(t.src, t.dst) for t in moved} == {(rank, rank + by) for rank in range(size - by)}
    assert {t.step for t in moved} <= {0}
    assert len(moved) == 3 * max(size - by, 0)


#: The other contracts tie blocks, or the order of results, to ranks.
SYMMETRIC = ("all_reduce", "barrier", "broadcast", "reduce")


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("name", [a.name for a in algorithms if a.collective.name in SYMMETRIC])
def test_renaming_the_ranks_keeps_a_contract_that_is_symmetric(name: str, size: int) -> None:
    algorithm = algorithms.load(name)
    sound = algorithm.schedule(size, root=0)
    turned = [(rank + 1) % size for rank in range(size)]
    renamed = relabel(sound.transfers, ranks=turned)
    prove(Schedule(sound.collective, size, renamed, root=turned[0], parts=sound.parts))


Cut = Callable[[Iterable[Transfer], int], Iterable[Transfer]]


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("cut", [refine, pipeline])
@pytest.mark.parametrize("name", algorithms.names())
def test_cutting_finer_keeps_every_contract_and_order(name: str, cut: Cut, factor: int) -> None:
    sound = algorithms.load(name).schedule(5, root=3)
    fine = Schedule(
        sound.collective, 5, cut(sound.transfers, factor), root=3, parts=sound.parts * factor
    )
    assert prove(fine) == prove(sound)
    late = factor - 1 if cut is pipeline else 0
    assert len(fine.steps) == len(sound.steps) + late


@pytest.mark.parametrize("size", range(1, 9))
def test_every_reduce_scatter_and_every_all_gather_make_an_all_reduce(size: int) -> None:
    halves = [
        [a for a in algorithms if a.collective.name == name]
        for name in ("reduce_scatter", "all_gather")
    ]
    assert all(halves)
    for first in halves[0]:
        for second in halves[1]:
            both = sequence(first(size), second(size))
            prove(Schedule(collectives.load("all_reduce"), size, both, parts=size))


@pytest.mark.parametrize("size", range(1, 9))
def test_every_scan_after_a_shift_is_an_exclusive_scan(size: int) -> None:
    scans = [a for a in algorithms if a.collective.name == "scan"]
    assert scans
    for scan in scans:
        above = relabel(scan(size - 1), ranks=range(1, size)) if size > 1 else []
        parts = scan.schedule(size - 1).parts if size > 1 else 1
        both = sequence(shift(size, chunks=range(parts)), above)
        prove(Schedule(collectives.load("exscan"), size, both, parts=parts))


@pytest.mark.parametrize(("groups", "inside"), [(1, 1), (1, 4), (2, 2), (3, 4), (4, 3)])
def test_every_all_reduce_nests_in_every_other(groups: int, inside: int) -> None:
    size = groups * inside
    rows = [range(group * inside, (group + 1) * inside) for group in range(groups)]
    columns = [range(local, size, inside) for local in range(inside)]
    simple = [a for a in algorithms
              if a.collective.name == "all_reduce" and a.schedule(inside).parts == 1
              and a.schedule(groups).parts == 1]  # fmt: skip
    assert simple
    for inner in simple:
        for outer in simple:
            both = sequence(nest(rows, inner), nest(columns, outer))
            prove(Schedule(collectives.load("all_reduce"), size, both))


def test_nested_groups_may_have_chunks_of_their_own() -> None:
    swap = [Transfer(0, 0, 1, 0), Transfer(0, 1, 0, 1)]
    found = nest([[0, 1], [3, 2]], lambda _: swap, chunks=lambda group, chunk: 2 * group + chunk)
    assert [tuple(t)[1:4] for t in found] == [(0, 1, 0), (1, 0, 1), (3, 2, 2), (2, 3, 3)]
