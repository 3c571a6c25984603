"""Errors: one root, and messages that end the search."""

from __future__ import annotations

import inspect
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay import errors
from roundelay.errors import (
    FormatError,
    InvalidArgumentError,
    NetworkError,
    ProofError,
    RoundelayError,
    ScheduleError,
    UnknownNameError,
    UnsupportedSizeError,
)
from roundelay.schedule import Failure

CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass)
           if value.__module__ == errors.__name__]  # fmt: skip


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_has_one_root_and_is_exported(error: type[Exception]) -> None:
    assert issubclass(error, RoundelayError)
    assert error.__name__ in errors.__all__
    assert error.__doc__


#: What every class is made from; each must come out of another process as it went in.
MADE = {
    errors.CheckpointMismatch: ("a/b", ["w: float32[2], not float32[3]"]),
    errors.FormatError: ("a.json: x", "is 3"),
    errors.LimitError: ("no more files", 24),
    errors.MissingPackageError: ("rd.prepare", "torch"),
    errors.NetworkError: ("a.json: x", "is 3"),
    errors.NoEngineError: (),
    errors.NoRoomError: (10, 3, "empty"),
    errors.NotFiniteError: (["w"], [1]),
    errors.ProofError: ("ring", []),
    errors.RankFailed: (1, "ValueError", "bad row"),
    errors.RecordError: ("rank-0.rdtrace", "it was cut off"),
    errors.ScheduleError: ("a.json: x", "is 3"),
    errors.UnknownNameError: ("engines", "thread", ["threads"]),
    errors.UnsupportedSizeError: ("ring", 3, "powers of two"),
}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda error: error.__name__)
def test_an_error_goes_from_process_to_process_as_it_is(kind: type[Exception]) -> None:
    error = kind(*MADE.get(kind, ("what happened",)))
    error.add_note("On rank 1")
    read = pickle.loads(pickle.dumps(error))
    assert type(read) is kind
    assert (str(read), vars(read)) == (str(error), vars(error))


def test_a_failed_proof_is_no_wrong_use() -> None:
    assert not issubclass(ProofError, InvalidArgumentError)
    for wrong_use in (UnknownNameError, UnsupportedSizeError, ScheduleError, NetworkError):
        assert issubclass(wrong_use, InvalidArgumentError)
        assert issubclass(wrong_use, ValueError)


@pytest.mark.parametrize("kind", [FormatError, ScheduleError, NetworkError])
def test_a_malformed_thing_is_named_with_its_place(kind: type[FormatError]) -> None:
    error = kind("mine.json: transfers[3].dst", "is 9")
    assert (error.place, error.problem) == ("mine.json: transfers[3].dst", "is 9")
    assert str(error) == "mine.json: transfers[3].dst: is 9"


@pytest.mark.parametrize("known", [["threads", "reference"], []])
def test_an_unknown_name_comes_with_what_is_known(known: list[str]) -> None:
    message = str(UnknownNameError("engines", "thread", known))
    assert message.startswith("engines has no 'thread'.")
    assert ("Did you mean 'threads'?" in message) == bool(known)
    assert message.endswith(f"Known: {', '.join(sorted(known))}.")


@given(st.text() | st.text(min_size=1).map(lambda text: text * 10_000))
def test_names_from_strangers_stay_short_and_printable(name: str) -> None:
    error = UnknownNameError("engines", name, ["threads"])
    assert error.name == name
    assert str(error).isprintable()
    assert len(str(error)) < 800


def test_a_size_that_can_not_be_taken_comes_with_those_that_can() -> None:
    error = UnsupportedSizeError("barrier_odd", 6, "powers of two")
    assert str(error) == "barrier_odd does not run on 6 ranks; it takes powers of two."
    assert (error.algorithm, error.size, error.takes) == ("barrier_odd", 6, "powers of two")


@pytest.mark.parametrize("count", [1, 5, 6, 100])
def test_a_failed_proof_shows_the_first_failures_and_counts_the_rest(count: int) -> None:
    failures = [Failure("missing", rank, 0, None, "gone") for rank in range(count)]
    error = ProofError("mine", failures)
    assert error.failures == tuple(failures)
    shown = str(error).splitlines()[1:]
    assert [line.strip() for line in shown[:5]] == [str(failure) for failure in failures[:5]]
    assert [line.strip() for line in shown[5:]] == (
        [f"… and {count - 5} more"] if count > 5 else []
    )
