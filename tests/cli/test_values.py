"""Real numbers: the tables that introductions print, and every reduction against plain Python."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence

import pytest
from click.testing import Result

from roundelay.algorithms import algorithms
from roundelay.errors import UnsupportedSizeError

FOUR = "1,1 2,2 3,3 4,4"
GATHERED = "[[1, 1], [2, 2], [3, 3], [4, 4]]"
NOTHING = "-"


def outputs(result: Result) -> dict[int, str]:
    """Read the table at the end back."""
    table = result.stdout[result.stdout.rindex("| GPU | output") :].splitlines()[2:]
    rows = [line.strip("|").split("|") for line in table if line.startswith("|")]
    return {int(rank): output.strip() for rank, output in rows}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["all_reduce"], ["[10, 10]"] * 4),
        (["all_reduce", "--op", "avg"], ["[2.5, 2.5]"] * 4),
        (["all_reduce", "--op", "maxloc"], ["[4@3, 4@3]"] * 4),
        (["all_gather"], [GATHERED] * 4),
        (["broadcast"], ["[1, 1]"] * 4),
        (["broadcast", "--root", "2"], ["[3, 3]"] * 4),
        (["reduce", "--root", "3"], [NOTHING, NOTHING, NOTHING, "[10, 10]"]),
        (["gather"], [GATHERED, NOTHING, NOTHING, NOTHING]),
        (["scan"], ["[1, 1]", "[3, 3]", "[6, 6]", "[10, 10]"]),
        (["exscan"], [NOTHING, "[1, 1]", "[3, 3]", "[6, 6]"]),
        (["reduce_scatter", "--counts", "1,1,0,0"], ["[10]", "[10]", "[]", "[]"]),
        (["reduce_scatter", "--counts", "1,1,0,0", "--op", "avg"], ["[2.5]", "[2.5]", "[]", "[]"]),
        (["scatter", "--counts", "0,1,0,1"], ["[]", "[1]", "[]", "[1]"]),
    ],
)
def test_four_ranks_of_two_numbers(
    run: Callable[..., Result], arguments: list[str], expected: list[str]
) -> None:
    collective = arguments[0]
    for algorithm in algorithms:
        if algorithm.collective.name != collective:
            continue
        result = run("explain", *arguments, "-a", algorithm.name, "--values", FOUR, "--ascii")
        assert result.exit_code == 0, result.stderr
        assert outputs(result) == dict(enumerate(expected))


@pytest.mark.parametrize("name", [n for n in algorithms.names() if n.startswith("all_to_all")])
def test_all_to_all_transposes(run: Callable[..., Result], name: str) -> None:
    values = "0,1,2 10,11,12 20,21,22"
    result = run("explain", "all_to_all", "-a", name, "--values", values, "--ascii")

    assert outputs(result) == {r: f"[[{r}], [{10 + r}], [{20 + r}]]" for r in range(3)}


FOLDS: dict[str, Callable[[Sequence[int]], int | float]] = {
    "sum": sum,
    "prod": math.prod,
    "min": min,
    "max": max,
    "avg": lambda values: sum(values) / len(values),
    "land": lambda values: int(all(values)),
    "lor": lambda values: int(any(values)),
    "lxor": lambda values: sum(map(bool, values)) % 2,
    "band": lambda values: functools.reduce(operator.and_, values),
    "bor": lambda values: functools.reduce(operator.or_, values),
    "bxor": lambda values: functools.reduce(operator.xor, values),
}


@pytest.mark.parametrize("op", FOLDS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_reduction_on_every_all_reduce(
    run: Callable[..., Result], op: str, size: int
) -> None:
    values = [[3 * rank % 7, rank + 1, 6] for rank in range(size)]
    folded = [FOLDS[op](column) for column in zip(*values, strict=True)]
    expected = ", ".join(f"{value:.6g}" if op == "avg" else str(value) for value in folded)
    written = " ".join(",".join(map(str, row)) for row in values)
    for algorithm in algorithms:
        if algorithm.collective.name != "all_reduce":
            continue
        try:
            algorithm.schedule(size)
        except UnsupportedSizeError:
            continue
        result = run("explain", algorithm.name, "--values", written, "--op", op, "--ascii")
        assert result.exit_code == 0, result.stderr
        assert set(outputs(result).values()) == {f"[{expected}]"}


def test_numbers_of_ranks_come_from_the_values(run: Callable[..., Result]) -> None:
    assert len(outputs(run("explain", "all_reduce", "--values", "1 2 3", "--ascii"))) == 3
    one = run("explain", "broadcast", "--values", "7,8", "-n", "3", "--ascii")
    assert outputs(one) == dict.fromkeys(range(3), "[7, 8]")


def test_uneven_gather_needs_no_counts(run: Callable[..., Result]) -> None:
    result = run("explain", "all_gather", "--values", "[1] [] [2, 3]", "--ascii")

    assert outputs(result) == dict.fromkeys(range(3), "[[1], [], [2, 3]]")


def test_steps_show_numbers_and_long_runs_are_cut(run: Callable[..., Result]) -> None:
    steps = run("explain", "all_reduce", "-a", "tree", "--values", "1 2", "--ascii").stdout
    assert ">[3]*" in steps

    many = ",".join(map(str, range(100)))
    result = run("explain", "all_reduce", "-a", "tree", "--values", f"{many} {many}", "--ascii")
    assert result.stdout.isascii()
    assert "99]" in result.stdout
    assert outputs(run("explain", "reduce", "--values", "1.5 2", "--ascii"))[0] == "[3.5]"
