"""The command itself: help, version, exit codes, and what goes where."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import roundelay
from roundelay import _core, cli

MAIN = "from roundelay.cli import main; main()"
COMMANDS = sorted(
    path.stem for path in Path(cli.__file__).parent.glob("*.py") if path.stem[0] != "_"
)


def test_alone_it_shows_help_with_every_command_and_examples(run: Callable[..., Result]) -> None:
    result = run()

    assert result.exit_code == 0
    assert all(f"  {name}" in result.stdout for name in COMMANDS)
    assert "Examples:" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_file_is_a_command_with_help(run: Callable[..., Result], name: str) -> None:
    result = run(name, "--help")

    assert result.exit_code == 0
    assert f"roundelay {name}" in result.stdout


def test_version_names_the_native_core(run: Callable[..., Result]) -> None:
    result = run("--version")

    assert result.exit_code == 0
    assert roundelay.__version__ in result.stdout
    assert _core.compiler() in result.stdout
    assert all(name in result.stdout for name in _core.instruction_sets())


@pytest.mark.parametrize(("typed", "meant"), [("lst", "list"), ("explian", "explain")])
def test_unknown_command_suggests_the_nearest(
    run: Callable[..., Result], typed: str, meant: str
) -> None:
    result = run(typed)

    assert result.exit_code == 2
    assert f"Did you mean '{meant}'?" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", [["explain", "all_reduce", "-n", "16"], ["list"]])
def test_a_reader_that_leaves_early_is_no_error(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, *command],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert done.stderr == ""
    assert done.returncode in (0, 1)
