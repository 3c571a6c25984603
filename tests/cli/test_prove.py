"""`roundelay prove` finds every fault, and says so by its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.collectives.all_reduce import all_reduce
from roundelay.schedule import Schedule, Transfer, save


def test_every_algorithm_is_proved_for_every_root(run: Callable[..., Result]) -> None:
    result = run("prove", "--sizes", "1-5", "--json")
    verdicts = {verdict["name"]: verdict for verdict in json.loads(result.stdout)}

    assert result.exit_code == 0
    assert sorted(verdicts) == algorithms.names()
    for name, verdict in verdicts.items():
        sizes = [size for size in range(1, 6) if size not in verdict["skipped_sizes"]]
        rooted = algorithms.load(name).collective.rooted
        assert verdict["proved"] == (sum(sizes) if rooted else len(sizes))
        assert verdict["failures"] == []


@pytest.mark.parametrize("name", [*collectives.names(), "all-reduce_RING", "allreduce"])
def test_names_are_algorithms_or_collectives_in_any_spelling(
    run: Callable[..., Result], name: str
) -> None:
    result = run("prove", name, "--sizes", "2,3", "--ascii")

    assert result.exit_code == 0
    assert result.stdout.isascii()
    wanted = name.lower().replace("-", "").replace("_", "")
    for algorithm in algorithms:
        names = (algorithm.name, algorithm.collective.name)
        expected = wanted in (each.replace("_", "") for each in names)
        assert (f" {algorithm.name} " in result.stdout) == expected


def test_failing_schedule_is_told_with_its_place(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    save(Schedule(all_reduce, 2, [Transfer(0, 0, 1, 0, "reduce")], name="mine"), path)
    result = run("prove", "--schedule", str(path))

    assert result.exit_code == 1
    assert "1 failed" in result.stdout
    assert "rank 0, chunk 0 (a): missing" in result.stderr


def test_good_schedule_from_a_file_is_proved(run: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save(algorithms.load("all_reduce_tree").schedule(5), path)
    result = run("prove", "--schedule", str(path))

    assert result.exit_code == 0
    assert "all_reduce_tree" in result.stdout


def test_faulty_algorithm_fails_with_exit_code_1(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = algorithms.load("all_reduce_ring")
    whole = ring.function
    monkeypatch.setattr(ring, "function", lambda size, **_: list(whole(size))[:-1])
    result = run("prove", "all_reduce_ring", "--sizes", "3", "--json")

    assert result.exit_code == 1
    assert json.loads(result.stdout)[0]["failures"] != []
    assert "all_reduce_ring on 3 ranks" in result.stderr
