"""`--hosts`: what runs over hosts is drawn, written, priced and proved like everything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from roundelay.collectives import collectives
from roundelay.networks import networks
from roundelay.schedule import find_failures, load, over_hosts, price

HOSTS = ((0, 1, 2), (3, 4))
SIZES = {"1KiB": 1, "1MiB": 2}  # bytes, and the lanes that carry them


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("name", collectives.names())
def test_every_kind_of_output_shows_the_phases_and_the_hosts(
    run: Callable[..., Result], tmp_path: Path, name: str, nbytes: str
) -> None:
    collective = collectives.load(name)
    page, drawing, file = (tmp_path / f"over.{kind}" for kind in ("html", "svg", "json"))
    asked = ["explain", name, "--hosts", "3,2", "--bytes", nbytes]
    printed = run(*asked)
    written = run(*asked, "--out", str(page), "--out", str(drawing), "--out", str(file))

    assert (printed.exit_code, written.exit_code, written.stdout) == (0, 0, "")
    nested = over_hosts(collectives.load(name), HOSTS, lanes=SIZES[nbytes])
    told = " ".join(printed.stdout.split())
    title = f"{name}_hierarchical on 5 ranks of 2 hosts"
    assert f"{name}_hierarchical is proved to keep the contract of {name}" in told
    assert "on hosts" in told
    for text in (told, page.read_text(), drawing.read_text()):
        assert title in text
        if len(nested.phases) > 1:
            for phase in nested.phases:
                kind = phase.calls[0].collective.name.replace("_", "-")
                where = {"inside": "inside", "lane": "between hosts"}[phase.axis]
                assert f"{kind} {where}".casefold() in " ".join(text.split()).casefold()
    for text in (page.read_text(), drawing.read_text()):
        assert "host0" in text
        assert "host1" in text

    schedule = load(file)
    assert schedule.collective.name == name
    assert find_failures(schedule) == []
    assert run("prove", "--schedule", str(file)).exit_code == 0
    cost = price(schedule, 1 << 20, network=networks.load("hosts")(5, per_host=[3, 2]))
    assert nbytes != "1MiB" or collective.idempotent or f"{cost.messages} messages" in told


def test_so_many_hosts_share_the_ranks_evenly(run: Callable[..., Result]) -> None:
    given = run("explain", "all_gather", "--hosts", "2", "-n", "5")
    assert given.stdout == run("explain", "all_gather", "--hosts", "3,2").stdout
    assert run("explain", "all_gather", "--hosts", "2").stdout.startswith(
        "all_gather_hierarchical on 4 ranks of 2 hosts"
    )
    assert " of 1 host\n" in run("explain", "all_gather", "--hosts", "1").stdout


def test_all_reduce_with_a_ring_between_is_the_algorithm_of_that_name(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("over.json", "named.json")]
    ways = [["--hosts", "2", "-O", "between=ring"], ["-a", "hierarchical", "-O", "group=3"]]
    for file, way in zip(files, ways, strict=True):
        assert run("explain", "all_reduce", "-n", "6", *way, "--out", str(file)).exit_code == 0
    over, named = (load(file) for file in files)
    assert set(over.transfers) == set(named.transfers)
    assert over.parts == named.parts


def test_real_numbers_go_over_hosts(run: Callable[..., Result]) -> None:
    result = run("explain", "all_reduce", "--hosts", "2", "--values", "1 2 3 4", "--op", "avg")
    assert result.stdout[result.stdout.index("output") :].count("[2.5]") == 4


def test_prove_takes_every_collective_with_one_lane_and_with_all(
    run: Callable[..., Result],
) -> None:
    result = run("prove", "--hosts", "2", "--sizes", "1-4", "--json")
    found = {row["collective"]: row for row in json.loads(result.stdout)}
    assert (result.exit_code, sorted(found)) == (0, collectives.names())
    for name, row in found.items():
        rooted = collectives.load(name).rooted
        assert row["name"] == f"{name}_hierarchical"
        assert row["proved"] == 2 * (2 + 3 + 4 if rooted else 3)
        assert (row["skipped_sizes"], row["failures"]) == ([1], [])
    assert found["all_reduce"]["order"] == "contiguous"
    uneven = json.loads(run("prove", "reduce", "--hosts", "3,1", "--json").stdout)
    assert [row["proved"] for row in uneven] == [8]


@pytest.mark.parametrize(
    ("line", "told"),
    {
        "explain all_gather --hosts two": "takes a number of hosts, or the ranks of each",
        "explain all_gather --hosts 0": "takes a number of hosts, or the ranks of each",
        "explain all_gather --hosts 4,0": "takes a number of hosts, or the ranks of each",
        "explain all_gather --hosts 2,2 -n 5": "--hosts 2,2 has 4 ranks, not 5",
        "explain all_gather --hosts 5": "it takes at least 5 ranks",
        "explain all_gather --hosts 2 --root 1": "all_gather has no root",
        "explain all_gather --hosts 2 -a ring": "-O inside=NAME and -O between=NAME",
        "explain all_gather --hosts 2 --diff ring,direct": "Leave out --algorithm and --diff",
        "explain all_gather --hosts 2 --program 0": "a program for every phase",
        "explain all_gather --hosts 2 -O between=tree": "there it is all_gather",
        "explain all_gather --hosts 2 -O lanes=2": "Known: between, inside",
        "explain --schedule mine.json --hosts 2": "Leave out --hosts",
        "explain all_gather --hosts 2 -n 2000": "Up to 1024 ranks are fine",
        "prove --schedule mine.json --hosts 2": "Leave out --hosts",
        "prove --hosts 2,2 --sizes 4": "Leave out --sizes",
    }.items(),
)
def test_what_can_not_be_is_refused(run: Callable[..., Result], line: str, told: str) -> None:
    result = run(*line.split())
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())
