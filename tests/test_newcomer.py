"""What a newcomer copies out of CONTRIBUTING works at once, with no other edit.

It is put beside the package, not into it, so that a test that is killed leaves nothing behind.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundelay.schedule import from_json

ROOT = Path(__file__).parent.parent
FENCED = re.MULTILINE | re.DOTALL


def newcomers() -> dict[str, str]:
    """Return the files that CONTRIBUTING shows, by their path in the package."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = r"^```python\n(# src/roundelay/(\S+)\n.*?)^```"
    return {path: code for code, path in re.findall(block, text, FENCED)}


BESIDE = """
import importlib, sys
for family in ("algorithms", "collectives", "networks"):
    importlib.import_module("roundelay." + family).__path__.append(sys.argv[1] + "/" + family)
"""


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """Return a folder with a newcomer's files, laid out like the package."""
    for family in ("algorithms", "collectives", "networks"):
        (tmp_path / family).mkdir()
    for path, code in newcomers().items():
        (tmp_path / path).write_text(code, encoding="utf-8")
    return tmp_path


def run_beside(folder: Path, program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", BESIDE + program, str(folder), *arguments],
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def roundelay(folder: Path, *arguments: str) -> str:
    program = "del sys.argv[1]\nfrom roundelay.cli import main\nmain()"
    return run_beside(folder, program, *arguments)


def test_the_first_newcomer_has_ten_lines_of_code_and_two_sentences() -> None:
    assert list(newcomers()) == [
        "algorithms/all_reduce_line.py", "collectives/rotate.py", "networks/line.py"
    ]  # fmt: skip
    lines = newcomers()["algorithms/all_reduce_line.py"].splitlines()[1:]
    assert len([line for line in lines if line and '"""' not in line]) == 10
    assert len([line for line in lines if '"""' in line]) == 2


def test_a_newcomers_algorithm_is_listed_proved_priced_and_drawn(beside: Path) -> None:
    assert re.search(r"all_reduce +│ line +│ +14 ", roundelay(beside, "list"))
    proved = roundelay(beside, "prove", "all_reduce_line")
    assert re.search(r"✓ │ all_reduce_line │ all_reduce │ +16 │ rank_order", proved)
    for network in ("switch", "line"):
        drawn = roundelay(beside, "explain", "all_reduce", "-a", "line", "--network", network)
        assert "a0+a1+a2+a3✓" in drawn
        assert f"µs on {network}" in drawn
    files = [beside / f"line.{ending}" for ending in ("html", "svg", "json")]
    outs = [argument for file in files for argument in ("--out", str(file))]
    roundelay(beside, "explain", "all_reduce_line", "-n", "5", *outs)
    page, drawing, schedule = (file.read_text(encoding="utf-8") for file in files)
    assert page.startswith("<!doctype html>")
    assert drawing.startswith("<svg")
    assert "all_reduce_line" in page
    assert "all_reduce_line" in drawing
    assert len(from_json(schedule).steps) == 8


def test_the_grids_of_the_tests_cover_a_newcomer(beside: Path, sample: Any) -> None:
    folders = ["algorithms", "collectives", "networks", "schedule", "engines"]
    program = """
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
    tests = [str(ROOT / "tests" / folder) for folder in folders]
    wanted = "((line and not pipeline) or rotate)"
    if sample.seed:  # engines that take long to start see it in `make test-all`
        wanted += " and not mpi and not gloo"
    out = run_beside(beside, program, "-k", wanted, "--rootdir", str(ROOT), *tests)
    passed = re.search(r"(\d+) passed", out)
    assert passed is not None
    assert int(passed[1]) > len(folders)
