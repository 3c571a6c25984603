"""What rank 0 decides: the same operations in one order for all, whoever submits them when."""

from __future__ import annotations

import random
from itertools import combinations, permutations

import pytest

from roundelay.errors import ranks_text
from roundelay.fronts.horovod.control import RankMessage
from roundelay.fronts.horovod.coordinator import Coordinator, Decision, Outcome, Said
from roundelay.fronts.horovod.operation import ALLREDUCE, BARRIER, KINDS

ALLGATHER = KINDS.index("allgather")


def heard(coordinator: Coordinator, *said: tuple[int, ...]) -> list[Decision]:
    """Tell a coordinator what ranks say, and return all that it decides."""
    return [one for words in said for one in coordinator.heard(RankMessage(*words))]


def submit(
    rank: int, name: int, terms: int = 0, kind: int = ALLREDUCE, inside: int = 0
) -> tuple[int, ...]:
    return rank, Said.SUBMIT, inside, name, terms, kind


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_runs_once_all_have_submitted_it_and_not_before(order: tuple[int, ...]) -> None:
    coordinator = Coordinator(3)
    assert heard(coordinator, *(submit(rank, 7) for rank in order[:-1])) == []
    assert heard(coordinator, submit(order[-1], 7)) == [Decision((0, 1, 2), Outcome.RUN, 0, 7)]


@pytest.mark.parametrize("came", [came for n in (1, 2) for came in combinations(range(3), n)])
def test_who_wonders_is_told_who_is_missing_and_goes_on_waiting(came: tuple[int, ...]) -> None:
    coordinator = Coordinator(3)
    heard(coordinator, *(submit(rank, 7) for rank in came))
    missing = [rank for rank in range(3) if rank not in came]
    for rank in came:
        (one,) = heard(coordinator, (rank, Said.WONDERS, 0, 7))
        assert (one.to, one.outcome, one.name) == ((rank,), Outcome.LATE, 7)
        assert one.text.startswith(f"{ranks_text(missing)} ha")
    (run,) = heard(coordinator, *(submit(rank, 7) for rank in missing))
    assert run.outcome == Outcome.RUN
    assert heard(coordinator, (0, Said.WONDERS, 0, 7)) == []  # it has been decided meanwhile


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_meets_the_operations_of_all_its_sets_in_one_order(seed: int) -> None:
    draw = random.Random(seed)
    coordinator = Coordinator(4)
    coordinator.members |= {1: (0, 1), 2: (1, 2, 3), 3: (0, 3)}
    names = [(inside, name) for inside in range(4) for name in range(5)]
    lines = []
    for rank in range(4):  # each in an order of its own
        mine = [key for key in names if rank in coordinator.members[key[0]]]
        draw.shuffle(mine)
        lines.append([submit(rank, name, inside=inside) for inside, name in mine])
    met: list[list[tuple[int, int]]] = [[] for _ in range(4)]
    while any(lines):
        line = draw.choice([line for line in lines if line])
        for decision in heard(coordinator, line.pop()):
            assert decision.outcome == Outcome.RUN
            for rank in decision.to:
                met[rank].append((decision.process_set, decision.name))
    for rank, order in enumerate(met):
        assert sorted(order) == [key for key in names if rank in coordinator.members[key[0]]]
        for other in met:
            both = {*order} & {*other}
            assert [key for key in order if key in both] == [key for key in other if key in both]


def test_different_terms_are_a_mismatch_of_that_operation_alone() -> None:
    coordinator = Coordinator(2)
    said = submit(0, 1, terms=5), submit(0, 2), submit(1, 1, terms=6), submit(1, 2)
    assert [one.outcome for one in heard(coordinator, *said)] == [Outcome.MISMATCH, Outcome.RUN]


def test_a_barrier_overtakes_what_is_pending() -> None:
    coordinator = Coordinator(2)
    said = submit(0, 1), submit(0, 2, kind=BARRIER), submit(1, 2, kind=BARRIER), submit(1, 1)
    assert [one.name for one in heard(coordinator, *said)] == [2, 1]


@pytest.mark.parametrize("joins_first", [False, True])
def test_who_has_joined_is_not_waited_for(*, joins_first: bool) -> None:
    coordinator = Coordinator(3)
    said = [submit(1, 9), submit(2, 9)]
    said.insert(0 if joins_first else 2, (0, Said.JOIN))
    (run,) = heard(coordinator, *said)
    assert run == Decision((0, 1, 2), Outcome.RUN_WITH_JOINED, 0, 9, 1)
    (refused,) = heard(coordinator, submit(1, 4, kind=ALLGATHER), submit(2, 4, kind=ALLGATHER))
    assert (refused.to, refused.outcome) == ((1, 2), Outcome.FAIL)
    assert "rank 0 has joined, and allgather" in refused.text
    (last,) = heard(coordinator, (2, Said.JOIN), (1, Said.JOIN))
    assert (last.outcome, last.argument) == (Outcome.ALL_JOINED, 1)
    assert heard(coordinator, submit(1, 9), submit(2, 9)) == []  # all are back


def test_who_leaves_fails_what_waits_for_it_and_the_last_one_ends_it() -> None:
    coordinator = Coordinator(2)
    (failed,) = heard(coordinator, submit(0, 3), (1, Said.LEAVE))
    assert (failed.to, failed.outcome) == ((0,), Outcome.FAIL)
    assert "rank 1 has shut down" in failed.text
    (again,) = heard(coordinator, submit(0, 3))
    assert again.outcome == Outcome.FAIL
    assert heard(coordinator, (0, Said.LEAVE)) == [Decision((0, 1), Outcome.END)]


def test_one_name_of_two_kinds_fails_once_all_do_nothing_but_wait() -> None:
    coordinator = Coordinator(2)
    one = 0, Said.SUBMIT, 0, 5, 0, ALLREDUCE, 0, 77
    other = 1, Said.SUBMIT, 0, 6, 0, ALLGATHER, 0, 77
    assert heard(coordinator, one, other, (0, Said.WAITS, 0, 5)) == []
    assert heard(coordinator, (1, Said.WAITS, 0, 6)) == [
        Decision((0,), Outcome.KINDS_DIFFER, 0, 5),
        Decision((1,), Outcome.KINDS_DIFFER, 0, 6),
    ]
    # Who still submits may mean both.
    assert heard(coordinator, one, other, (0, Said.WAITS, 0, 5)) == []
    both = [Decision((0, 1), Outcome.RUN, 0, 6), Decision((0, 1), Outcome.RUN, 0, 5)]
    assert heard(coordinator, (0, *other[1:]), (1, *one[1:])) == both


def test_what_stalls_says_who_has_that_name_as_another_kind() -> None:
    coordinator = Coordinator(2, 3.0)
    one = 0, Said.SUBMIT, 0, 5, 0, ALLREDUCE, 0, 77
    other = 1, Said.SUBMIT, 0, 6, 0, ALLGATHER, 0, 77
    (failed,) = heard(coordinator, one, other, (0, Said.STALLED, 0, 5))
    assert "within 3 s, the timeout. Rank 1 has submitted allgather of that name." in failed.text


def test_what_stalls_fails_and_says_for_whom_it_waited() -> None:
    coordinator = Coordinator(4)
    (failed,) = heard(coordinator, submit(0, 3), submit(2, 3), (0, Said.STALLED, 0, 3))
    assert failed.to == (0, 2)
    assert failed.text.startswith("ranks 1, 3 have not submitted it within 60 s, the timeout. A ")
    assert heard(coordinator, (2, Said.STALLED, 0, 3)) == []


@pytest.mark.parametrize("first", ["join", "leave"])
def test_who_waits_in_join_is_told_of_ranks_that_have_left(first: str) -> None:
    said = [(0, Said.JOIN), (1, Said.LEAVE)]
    coordinator = Coordinator(3)
    decided = heard(coordinator, *(said if first == "join" else said[::-1]))
    assert [(one.to, one.outcome) for one in decided] == [((0,), Outcome.FAIL)]
    assert "rank 1 has shut down and will not join" in decided[0].text


@pytest.mark.parametrize("waits", [submit(0, 3), (0, Said.JOIN)])
@pytest.mark.parametrize("first", ["waits", "leaves"])
def test_who_leaves_as_it_raises_something_is_told_once_it_is_missed(
    waits: tuple[int, ...], first: str
) -> None:
    said = [waits, (1, Said.LEAVE, 1)]
    decided = heard(Coordinator(3), *(said if first == "waits" else said[::-1]))
    assert decided == [Decision((1,), Outcome.MISSED)]
    assert heard(Coordinator(3), (1, Said.LEAVE, 1)) == []


def test_lines_that_differ_are_told_of_once() -> None:
    coordinator = Coordinator(2)

    def pair(name: int, *lines: int) -> int:
        said = [(*submit(rank, name), line) for rank, line in enumerate(lines)]
        (decided,) = heard(coordinator, *said)
        assert decided.outcome == Outcome.RUN
        return decided.argument

    assert [pair(1, 5, 5), pair(2, 5, 6), pair(3, 6, 5), pair(4, 5, 7)] == [0, 1, 0, 1]


def test_what_waits_in_a_process_set_that_goes_fails() -> None:
    coordinator = Coordinator(3)
    coordinator.members[1] = (0, 1)
    assert heard(coordinator, submit(1, 7, inside=1), submit(2, 8)) == []
    del coordinator.members[1]
    (failed,) = coordinator.removed(1)
    assert (failed.to, failed.outcome, failed.name) == ((1,), Outcome.FAIL, 7)
    (late,) = heard(coordinator, submit(0, 9, inside=1))
    assert (late.to, late.outcome) == ((0,), Outcome.FAIL)
    assert "process set was removed" in late.text
