"""`roundelay explain` shows every algorithm truly, and writes what it says it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from roundelay.algorithms import algorithms
from roundelay.collectives.all_reduce import all_reduce
from roundelay.networks import networks
from roundelay.schedule import (
    Schedule,
    Transfer,
    compile_schedule,
    format_program,
    load,
    save,
    to_json,
)
from roundelay.view import picture
from roundelay.view.terminal_text import ASCII, safe

FAULTY = Schedule(
    all_reduce,
    size=3,
    transfers=[
        Transfer(0, src=1, dst=0, chunk=0, op="reduce"),
        Transfer(1, src=1, dst=0, chunk=0, op="reduce"),
        Transfer(2, src=0, dst=1, chunk=0),
        Transfer(2, src=0, dst=2, chunk=0),
    ],
    name="mine",
)


def last_frame(text: str) -> str:
    return text[text.rindex("Step ") if "Step " in text else 0 :]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", algorithms.names())
def test_last_frame_holds_what_the_contract_asks(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    algorithm = algorithms.load(name)
    result = run("explain", name, "-n", str(size), "--ascii")
    drawn = picture(algorithm.schedule(size))

    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.isascii()
    assert result.stdout.count("\nStep ") == len(drawn.frames) - 1
    rows = last_frame(result.stdout).splitlines()
    for rank in range(size):
        row = next(row for row in rows if row.startswith(f"| GPU{rank} "))
        for cell, view in drawn.frames[-1].cells.items():
            if cell.rank == rank and view.done:
                assert f"{safe(view.text, ASCII)}*" in row


@pytest.mark.parametrize("size", [33, 64])
@pytest.mark.parametrize("name", ["all_reduce_ring", "broadcast_binomial", "all_gather_direct"])
def test_large_schedules_are_summed_up(run: Callable[..., Result], name: str, size: int) -> None:
    result = run("explain", name, "-n", str(size))
    frames = result.stdout.split("\n\nStep ")

    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 120
    assert all(frame.count("\n") < 24 for frame in frames)
    assert "finished" in last_frame(result.stdout)


@pytest.mark.parametrize("spelling", ["all-reduce", "allreduce", "AllReduce", "ALL_REDUCE"])
def test_collectives_have_many_spellings(run: Callable[..., Result], spelling: str) -> None:
    assert run("explain", spelling).stdout == run("explain", "all_reduce").stdout


def test_root_and_options_reach_the_algorithm(run: Callable[..., Result]) -> None:
    result = run(
        "explain", "broadcast", "-a", "chain", "--root", "2", "-O", "segments=2", "-n", "3"
    )
    first = result.stdout[: result.stdout.index("Step 1")]

    assert "root 2" in first
    assert [row for row in first.splitlines() if "a2" in row and "b2" in row and "GPU2" in row]


@pytest.mark.parametrize("name", networks.names())
def test_every_network_prices(run: Callable[..., Result], name: str) -> None:
    result = run("explain", "all_reduce", "--network", name)

    assert result.exit_code == 0
    assert f"on {name}" in result.stdout.replace("\n", " ")


@pytest.mark.parametrize("name", algorithms.names())
def test_written_json_is_the_schedule(
    run: Callable[..., Result], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "mine.json"
    result = run("explain", name, "-n", "5", "--out", str(path))

    assert result.exit_code == 0
    assert result.stdout == ""
    assert str(path) in result.stderr
    assert "--schedule" in result.stderr
    assert path.read_text() == to_json(algorithms.load(name).schedule(5))
    again = run("explain", "--schedule", str(path))
    assert again.exit_code == 0
    assert again.stdout == run("explain", name, "-n", "5").stdout


def test_several_files_at_once(run: Callable[..., Result], tmp_path: Path) -> None:
    names = ["a.html", "a.svg", "a.json"]
    files = [str(tmp_path / name) for name in names]
    result = run("explain", "all_reduce", *(word for file in files for word in ("--out", file)))

    assert result.exit_code == 0
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == [
        f"Wrote {file}" for file in files
    ]
    assert (tmp_path / "a.html").read_text().lower().startswith("<!doctype html>")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert len(load(tmp_path / "a.json").steps) == 6


def test_failing_schedule_is_drawn_with_the_step_marked(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    path, page = tmp_path / "mine.json", tmp_path / "mine.html"
    save(FAULTY, path)
    result = run("explain", "--schedule", str(path), "--ascii")
    frames = result.stdout.split("\nStep ")

    assert result.exit_code == 1
    assert ["! fails" in frame for frame in frames] == [False, False, True, True]
    assert frames[2].startswith("2 of 3")
    assert "! step 2, rank 0, chunk 0 (a): doubled" in frames[2]
    assert "a0+a1+a1!" in frames[2]
    assert "does NOT keep" in result.stdout
    assert "step 2, rank 0, chunk 0 (a): doubled" in result.stderr

    written = run("explain", "--schedule", str(path), "--out", str(page))
    assert written.exit_code == 1
    assert page.exists()
    assert "doubled" in written.stderr


@pytest.mark.parametrize("columns", ["60", "120", "300"])
def test_diff_shows_both_and_their_prices(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    result = run("explain", "all_reduce", "--diff", "ring,tree", "-n", "4")
    rows = json.loads(run("list", "all_reduce", "-n", "4", "--json").stdout)
    steps = {row["algorithm"]: row["steps"] for row in rows}
    titles = [line for line in result.stdout.splitlines() if "all_reduce_ring on" in line]

    assert result.exit_code == 0
    assert len(titles) == 1 + max(steps["ring"], steps["tree"])
    # Side by side when there is room, one under the other when there is not.
    assert all(("all_reduce_tree on" in title) == (columns == "300") for title in titles)
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
    comparison = result.stdout[result.stdout.rindex("│ steps") :].splitlines()[0]
    assert [int(word) for word in comparison.split() if word.isdigit()] == [
        steps["ring"],
        steps["tree"],
    ]


def test_diff_gives_each_its_own_options(run: Callable[..., Result]) -> None:
    result = run("explain", "broadcast", "--diff", "chain,binomial", "-O", "segments=2")

    assert result.exit_code == 0


@pytest.mark.parametrize("rank", range(3))
def test_program_is_what_the_compiler_made(run: Callable[..., Result], rank: int) -> None:
    programs = compile_schedule(algorithms.load("all_reduce_ring").schedule(3))
    result = run("explain", "all_reduce", "-n", "3", "--program", str(rank))

    assert result.exit_code == 0
    assert result.stdout == format_program(programs.ranks[rank]) + "\n"
    assert run("explain", "all_reduce", "--program", "0", "--ascii").stdout.isascii()


def test_program_of_a_failing_schedule_is_refused(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    save(FAULTY, tmp_path / "mine.json")
    result = run("explain", "--schedule", str(tmp_path / "mine.json"), "--program", "0")

    assert result.exit_code == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1MiB", 1 << 20), ("64KiB", 65536), ("1e6", 10**6), ("1MB", 10**6), ("4096", 4096), ("7", 7)],
)
def test_sizes_in_bytes(run: Callable[..., Result], text: str, nbytes: int) -> None:
    rows = json.loads(run("list", "broadcast", "--bytes", text, "--json").stdout)

    assert {row["bytes"] for row in rows} == {nbytes}
    assert all(row["sent"] >= nbytes for row in rows)
