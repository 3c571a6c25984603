"""`roundelay list` tells the truth about every algorithm."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result

from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.errors import UnsupportedSizeError
from roundelay.networks import networks
from roundelay.schedule import price, prove


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_json_agrees_with_price_and_prove(run: Callable[..., Result], size: int) -> None:
    result = run("list", "-n", str(size), "--bytes", "64KiB", "--network", "ring", "--json")
    rows = {row["name"]: row for row in json.loads(result.stdout)}

    assert result.exit_code == 0
    assert sorted(rows) == algorithms.names()
    network = networks.load("ring")(size)
    for name, row in rows.items():
        algorithm = algorithms.load(name)
        assert row["summary"] == algorithm.summary
        try:
            schedule = algorithm.schedule(size)
        except UnsupportedSizeError as error:
            assert error.takes in row["problem"]
            continue
        cost = price(schedule, 65536, network=network)
        assert row["steps"] == len(cost.steps)
        assert row["messages"] == cost.messages
        assert row["sent"] == max(cost.sent)
        assert row["sent_fraction"] == max(cost.sent) / 65536
        assert row["seconds"] == cost.seconds
        if row["order"] is not None:
            assert row["order"] == prove(schedule).order


@pytest.mark.parametrize("collective", collectives.names())
@pytest.mark.parametrize("columns", [40, 80, 200, None])
def test_table_has_a_row_for_every_algorithm(
    run: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    collective: str,
    columns: int | None,
) -> None:
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    result = run("list", collective, "--ascii")

    assert result.exit_code == 0
    assert result.stdout.isascii()
    for algorithm in algorithms:
        if algorithm.collective.name == collective and columns != 40:
            assert f" {algorithm.short_name} " in result.stdout
            # Piped without a width, a row is one line, fit for grep.
            assert algorithm.summary in result.stdout or columns is not None
    if columns is not None:
        assert max(map(len, result.stdout.splitlines())) <= columns


def test_progress_and_results_do_not_mix(run: Callable[..., Result]) -> None:
    result = run("list", "all_reduce")

    assert result.stderr == ""
    assert "On 8 ranks, for S = 1 MiB, on the network switch." in result.stdout
