"""The command itself: help, version, exit codes, and what goes where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import roundelay
from roundelay import _core, cli

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


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_shows_the_marks_of_its_source(run: Callable[..., Result], name: str) -> None:
    assert "\\b" not in run(name, "--help").stdout
