"""`roundelay demo`: it works, and what is broken on purpose ends cleanly on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result

Run = Callable[..., Result]

LEFT_NOTHING: dict[str, list[str]] = {
    "segments in /dev/shm": [],
    "processes": [],
    "rendezvous sockets": [],
    "open descriptors": [],
}


def test_the_demo_is_right_and_says_where_to_go_on(run: Run) -> None:
    result = run("demo")
    assert result.exit_code == 0, result.stderr
    assert "all_reduce" in result.stdout
    assert "see it: roundelay explain all_reduce" in result.stdout


def test_the_demo_as_json_has_no_wrong_number(run: Run) -> None:
    rows = json.loads(run("demo", "--json").stdout)
    assert {row["wrong"] for row in rows} == {0}
    assert len({row["collective"] for row in rows}) > 3


@pytest.mark.parametrize(
    ("fault", "error", "ranks", "said"),
    [
        ("kill", "PeerLost", {0, 1, 3}, "Rank 2 (process"),
        ("mismatch", "CollectiveMismatch", {0, 1, 2, 3}, "rank 2: barrier #"),
        ("stop", "CollectiveTimeout", {0, 1, 2, 3}, "for rank 2, which is"),
    ],
)
def test_every_rank_that_lives_gets_the_same_clean_error_and_nothing_is_left(
    run: Run, fault: str, error: str, ranks: set[int], said: str
) -> None:
    result = run("demo", "--fault", fault, "--timeout", "1", "--json")
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)
    assert {each["rank"] for each in made["errors"]} == ranks
    assert {each["error"] for each in made["errors"]} == {error}
    assert all(said in each["message"] for each in made["errors"])
    assert made["left_behind"] == LEFT_NOTHING
    assert 0 < made["seconds"] < 30


def test_a_fault_is_told_in_words_too(run: Run) -> None:
    result = run("demo", "--fault", "kill")
    assert result.exit_code == 0, result.stderr
    assert "ranks 0, 1, 3: PeerLost" in result.stdout
    assert "to the last clean error" in result.stdout
    assert "processes: none" in result.stdout


def test_a_host_without_room_gives_errors_and_no_signal(run: Run) -> None:
    result = run("demo", "--fault", "shm-full", "--json")
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)
    full, little, large = made["tries"]
    assert "4 of 4 ranks" in full["said"] or "can't be made here" in full["said"]
    assert little["error"]
    assert large["error"]
    assert made["left_behind"] == LEFT_NOTHING


@pytest.mark.parametrize("arguments", [("--fault", "explode"), ("--timeout", "0"),
                                       ("--timeout", "nan"), ("--timeout", "inf"),
                                       ("--fault", "stop", "--timeout", "inf")])  # fmt: skip
def test_wrong_use_is_refused(run: Run, arguments: tuple[str, ...]) -> None:
    result = run("demo", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
