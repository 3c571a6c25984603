"""A rank that cleans up while an exception is under way has failed by it, and is not through.

Who still needs it hears of the exception, and it is raised over nothing. Where nobody needs the
rank any more, closing is what it always was: an exception that is handled harms nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

Step = Callable[[Any], None]

CALLS = 3  # that all ranks make before one of them raises something


def in_finally(comm: Any, step: Step) -> None:
    try:
        step(comm)
    finally:
        comm.close()


def in_except(comm: Any, step: Step) -> None:
    try:
        step(comm)
    except BaseException:
        comm.close()
        raise
    comm.close()


def by_closing(comm: Any, step: Step) -> None:
    with contextlib.closing(comm):
        step(comm)


def by_a_stack(comm: Any, step: Step) -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(comm.close)
        step(comm)


def by_a_generator(comm: Any, step: Step) -> None:
    @contextlib.contextmanager
    def held() -> Iterator[None]:
        try:
            yield
        finally:
            comm.close()

    with held():
        step(comm)


def of_a_group(comm: Any, step: Step) -> None:
    group = comm.split(0)
    try:
        step(group)
    finally:
        group.close()


def far_below(comm: Any, step: Step) -> None:
    def clean(depth: int) -> None:
        if depth:
            clean(depth - 1)
        else:
            comm.close()

    try:
        step(comm)
    finally:
        clean(5)


CLEANED = [in_finally, in_except, by_closing, by_a_stack, by_a_generator, of_a_group, far_below]

#: What the others do next, for which they need the rank that is gone.
NEXT: dict[str, Step] = {
    "all_reduce": lambda c: c.all_reduce(np.ones(3)),
    "a long all_reduce": lambda c: c.all_reduce(np.ones(300_000)),
    "barrier": lambda c: c.barrier(),
    "in the background": lambda c: c.start.all_reduce(np.ones(3)).wait(),
    "split": lambda c: c.split(0),
    "recv": lambda c: c.recv(np.ones(3), 1),
    "a call that one does alone": lambda c: c.broadcast(np.ones(3), 0),
}

Made = Callable[[], BaseException]

#: What is raised, and what the others hear of it.
RAISED: dict[str, tuple[Made, str, str]] = {
    "an error": (lambda: ValueError("no"), "PeerLost", "Rank 1 failed: ValueError: no"),
    "an exit": (lambda: SystemExit(3), "PeerLost", "Rank 1 failed: SystemExit: 3"),
    "an exit with a text": (lambda: SystemExit("no"), "PeerLost", "Rank 1 failed: SystemExit: no"),
    "a Ctrl-C": (KeyboardInterrupt, "CommunicationError", "Rank 1 was interrupted."),
}


def broken_off(raised: Made, then: Step) -> Step:
    """Return work in which rank 1 raises something while the others go on."""

    def step(comm: Any) -> None:
        for _ in range(CALLS):
            comm.all_reduce(np.ones(3))
        if comm.rank == 1:
            raise raised()
        then(comm)

    return step


@pytest.mark.parametrize("clean", CLEANED)
@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("then", NEXT)
@pytest.mark.parametrize("size", [2, 3])
def test_the_others_hear_by_what_a_rank_fails_that_cleans_up(
    size: int, then: str, raised: str, clean: Callable[[Any, Step], None], ranks: Any
) -> None:
    error, others, text = RAISED[raised]
    found = ranks.outcomes(size, lambda comm: clean(comm, broken_off(error, NEXT[then])))
    expected = [others] * size
    expected[1] = type(error()).__name__
    assert [one.error for one in found] == expected, [one.trace for one in found]
    assert [one.message for one in found if one.error == others] == [text] * (size - 1)
    assert found[1].message == str(error())


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("clean", CLEANED)
@pytest.mark.parametrize("who", ["all", "one", "all but one"])
def test_a_handled_exception_closes_in_order(
    who: str, clean: Callable[[Any, Step], None], raised: str, ranks: Any
) -> None:
    """All ranks have made the same calls, and none needs another one any more."""
    error = RAISED[raised][0]

    def work(comm: Any) -> int:
        chosen = {"all": True, "one": comm.rank == 1, "all but one": comm.rank != 1}[who]

        def step(comm: Any) -> None:
            for _ in range(CALLS):
                comm.all_reduce(np.ones(3))
            if chosen:
                raise error()

        with contextlib.suppress(type(error())):
            clean(comm, step)
        return CALLS

    assert ranks(3, work) == [CALLS] * 3


@pytest.mark.parametrize("clean", CLEANED)
def test_calls_that_differed_are_told_though_an_exception_is_handled(
    clean: Callable[[Any, Step], None], ranks: Any
) -> None:
    def step(comm: Any) -> None:
        comm.broadcast(np.ones(3), comm.rank)
        raise StopIteration

    def work(comm: Any) -> None:
        with contextlib.suppress(StopIteration):
            clean(comm, step)

    assert [one.error for one in ranks.outcomes(3, work)] == ["CollectiveMismatch"] * 3


@pytest.mark.parametrize("harmless", [lambda: SystemExit(0), SystemExit, GeneratorExit])
def test_what_is_no_failure_closes_like_any_other(harmless: Made, ranks: Any) -> None:
    def work(comm: Any) -> None:
        in_finally(comm, broken_off(harmless, NEXT["all_reduce"]))

    assert [one.error for one in ranks.outcomes(3, work)] == ["CollectiveMismatch"] * 3


def test_an_exception_in_whose_handling_all_began_is_none_of_theirs(ranks: Any) -> None:
    """As where a program falls back on another module, and runs there."""

    def work(comm: Any) -> None:
        try:
            next(iter(()))
        except StopIteration:
            group = comm.split(0)
            if comm.rank == 1:
                group.close()
            else:
                group.all_reduce(np.ones(3))

    for found in ranks.outcomes(3, work):
        assert found.error == "CollectiveMismatch", found.trace
        assert "rank 1: closed the communicator" in found.message
