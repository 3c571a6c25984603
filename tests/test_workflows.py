"""What other files say of the Makefile, of pins and of Pythons is what those say themselves."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHONS = [
    word.rpartition(" ")[2]
    for word in PROJECT["project"]["classifiers"]
    if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", word)
]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_that_there_are(path: Path) -> None:
    targets = re.findall(r"^([a-z][a-z-]*):", text_of("Makefile"), re.MULTILINE)
    text = path.read_text(encoding="utf-8")
    assert {*re.findall(r"\bmake ([a-z-]+)", text)} <= {*targets}
    assert "\t" not in text
    assert "timeout-minutes:" in text


def test_every_change_is_tested_on_every_python_and_every_night_all_is_run() -> None:
    change, night = (text_of(f".github/workflows/{name}.yml") for name in ("test", "nightly"))
    assert re.findall(r'"(3\.\d+)"', change.partition("matrix:")[2].splitlines()[1]) == PYTHONS
    assert {"lint", "test"} <= {*re.findall(r"\bmake ([a-z-]+)", change)}
    assert {"test-all", "sanitize"} <= {*re.findall(r"\bmake ([a-z-]+)", night)}
    assert {*re.findall(r"make (\w+)", text_of(".ci/run"))} == {"lint", "test"}


def test_there_is_a_wheel_for_every_python() -> None:
    built = PROJECT["tool"]["cibuildwheel"]["build"].split()
    assert built == [f"cp{version.replace('.', '')}-*" for version in PYTHONS]
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"


def test_commits_are_looked_at_by_the_ruff_of_the_pins() -> None:
    (pinned,) = re.findall(r"^ruff==(.+)$", text_of("constraints.txt"), re.MULTILINE)
    hooks = text_of(".pre-commit-config.yaml")
    assert re.search(rf"ruff-pre-commit\n    rev: v{re.escape(pinned)}\n", hooks)
