"""Standard output in every state: closed, full, with a reader that leaves, of any width."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from click.testing import Result

MAIN = "from roundelay.cli import main; main()"
LINES = ["list barrier", "list barrier --json", "explain barrier -n 3", "prove barrier --sizes 3",
         "--help", "explain --help", "--version"]  # fmt: skip
Run = Callable[..., Result]


def started(line: str, stdout: IO[bytes]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, *line.split()],
        stdout=stdout, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_reader_that_leaves_ends_it_quietly_as_any_command_in_a_pipe(line: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        done = started(line, stdout)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("line", LINES)
def test_a_full_output_is_an_error_in_one_line(line: str) -> None:
    with Path("/dev/full").open("wb") as stdout:
        done = started(line, stdout)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Error: The output can't be written: No space left on device. Send it elsewhere."
    ]


@pytest.mark.parametrize("line", LINES)
def test_a_closed_output_is_one_that_nobody_wants(line: str) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, "-c", MAIN, *line.split()],
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("columns", ["0", "-1", "x", "", "\N{SUPERSCRIPT TWO}", "9" * 30])
@pytest.mark.parametrize("command", ["list barrier", "explain barrier", "prove barrier"])
def test_a_width_that_can_not_be_meant_is_none(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    result = run(*command.split())
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 1000


@pytest.mark.parametrize("columns", [1, 2, 10, 20, 40, 60, 70, 80, 100])
@pytest.mark.parametrize("command", ["list all_reduce", "prove all_reduce --sizes 2-4"])
def test_names_and_numbers_are_whole_at_every_width(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = run(*command.split())
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    if columns >= 40:
        assert "…" not in result.stdout
        assert any("double_binary_tree" in line for line in lines)


def test_one_rank_is_one(run: Run) -> None:
    for line in (
        *("list barrier -n 1", "explain barrier -n 1", "doctor -n 1"),
        *("explain broadcast -n 1 --root 1", "explain all_reduce -n 2 --values 1"),
    ):
        result = run(*line.split())
        assert "1 ranks" not in result.stdout + result.stderr
        assert "1 rank" in result.stdout + result.stderr


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "link to itself"])
def test_what_is_no_file_is_refused_and_never_waited_for(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "roundelay" / "tuning.json"
    path.parent.mkdir()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for words in (["explain", "--schedule", str(path)], ["prove", "--schedule", str(path)],
                  ["list", "--network", str(path)], ["verify", f"{path}:job"]):  # fmt: skip
        result = run(*words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "tuning.json" in result.stderr
    doctor = run("doctor", "-n", "1", "--paste")
    assert "[warning] tuning: not used" in doctor.stdout
