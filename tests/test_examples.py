"""Every example runs, and prints what it says it prints."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from roundelay.networks import load_network
from roundelay.schedule import load

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
MOST_LINES = 60


def test_there_are_examples() -> None:
    assert [path.name[:2] for path in SCRIPTS] == [f"{n:02}" for n in range(1, len(SCRIPTS) + 1)]
    assert SCRIPTS


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_is_short_and_prints_what_it_says(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MOST_LINES
    said = (ast.get_docstring(ast.parse(text)) or "").partition("Prints:\n\n")[2]
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-W", "error", str(path)],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == textwrap.dedent(said).strip() != ""


def test_every_file_beside_them_is_read() -> None:
    schedules = [load(path) for path in sorted(EXAMPLES.glob("schedules/*"))]
    networks = [load_network(path) for path in sorted(EXAMPLES.glob("networks/*"))]
    assert schedules
    assert networks
    known = {*SCRIPTS, *EXAMPLES.glob("schedules/*"), *EXAMPLES.glob("networks/*")}
    files = {
        path for path in EXAMPLES.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    }
    assert files == known
