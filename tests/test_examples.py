"""Every example runs, and prints what it says it prints."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from roundelay.networks import load_network
from roundelay.schedule import load

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("[0-9]*.py"))
#: Longer ones, with options; gpt.py is the model that both train.
PROGRAMS = [
    EXAMPLES / name
    for name in ("gpt.py", "train_gpt.py", "gpt_pipeline.py", "compare_strategies.py")
]
MOST_LINES = 60


def test_there_are_examples() -> None:
    assert [path.name[:2] for path in SCRIPTS] == [f"{n:02}" for n in range(1, len(SCRIPTS) + 1)]
    assert SCRIPTS


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_is_short_and_prints_what_it_says(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MOST_LINES
    docstring = ast.get_docstring(ast.parse(text)) or ""
    said = textwrap.dedent(docstring.partition("Prints:\n\n")[2]).strip()
    ranks = re.search(rf"^    roundelay run -n (\d+) {path.name}$", docstring, re.MULTILINE)
    launcher = ["-m", "roundelay", "run", "-n", ranks[1]] if ranks else []
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-W", "error", *launcher, str(path)],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    # Ranks that print by themselves do so in any order.
    printed = sorted(done.stdout.splitlines()) if ranks else done.stdout.strip().splitlines()
    assert printed == said.splitlines() != []


def test_an_example_that_is_launched_also_runs_alone(tmp_path: Path) -> None:
    script = EXAMPLES / "10_script.py"
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "rank 0 of 1 has rows 0 to 9: the sum of all is 45\n"


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_main_job_learns_and_accounts_for_it(strategy: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "roundelay", "run", "-n", "2",
         str(EXAMPLES / "train_gpt.py"), "--size", "nano", "--steps", "30", "--batch", "8",
         "--micro-batch", "2", "--strategy", strategy, "--out", str(tmp_path)],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = re.findall(r"loss ([\d.]+) → ([\d.]+) in 30 steps", done.stdout)[0]
    assert float(last) < float(first)
    assert "It writes:" in done.stdout
    assert f"{strategy}, 30 steps: predicted / measured" in done.stdout
    assert (tmp_path / "loss.svg").read_text().startswith("<svg")
    assert len(json.loads((tmp_path / "ledger.json").read_text())["entries"]) == 2


def test_the_main_job_learns_in_stages(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "roundelay", "run", "-n", "4",
         str(EXAMPLES / "train_gpt.py"), "--mesh", "dp=2,pp=2", "--pipeline", "1f1b", "--steps",
         "20", "--batch", "8", "--micro-batches", "2", "--out", str(tmp_path)],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = re.findall(r"loss ([\d.]+) → ([\d.]+) in 20 steps", done.stdout)[0]
    assert float(last) < float(first)
    assert "2 stages on 2 ranks" in done.stdout


def test_strategies_are_compared(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / "compare_strategies.py"), "--ranks", "2",
         "--steps", "3", "--batch", "4", "--out", str(tmp_path),
         "--json", str(tmp_path / "t.json")],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert {row["strategy"] for row in rows} >= {"ddp", "zero1", "zero2", "zero3", "ps", "ps-async"}
    assert len({row["loss"] for row in rows if not row["strategy"].startswith("ps-")}) == 1
    held = {row["strategy"]: row["held"][1] for row in rows}
    assert held["ddp"] > held["zero1"] > held["zero2"]


def test_every_file_beside_them_is_read() -> None:
    schedules = [load(path) for path in sorted(EXAMPLES.glob("schedules/*"))]
    networks = [load_network(path) for path in sorted(EXAMPLES.glob("networks/*"))]
    assert schedules
    assert networks
    known = {*SCRIPTS, *PROGRAMS, *EXAMPLES.glob("schedules/*"), *EXAMPLES.glob("networks/*")}
    files = {
        path for path in EXAMPLES.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    }
    assert files == known
