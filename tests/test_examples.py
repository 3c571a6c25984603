"""Every example runs, and prints what it says it prints."""

from __future__ import annotations

import ast
import importlib
import json
import multiprocessing
import re
import runpy
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

import roundelay as rd
from roundelay.networks import load_network
from roundelay.schedule import load

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("[0-9]*.py"))
#: Longer ones, with options; gpt.py is the model that both train.
PROGRAMS = [
    EXAMPLES / name
    for name in (
        "gpt.py",
        "gpt_pipeline.py",
        "train_gpt.py",
        "train_moe.py",
        "compare_strategies.py",
    )
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
         str(EXAMPLES / "train_gpt.py"), "--size", "nano", "--steps", "12", "--batch", "8",
         "--micro-batch", "2", "--strategy", strategy, "--out", str(tmp_path)],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = re.findall(r"loss ([\d.]+) → ([\d.]+) in 12 steps", done.stdout)[0]
    assert float(last) < float(first)
    assert "It writes:" in done.stdout
    assert f"{strategy}, 12 steps: predicted / measured" in done.stdout
    assert (tmp_path / "loss.svg").read_text().startswith("<svg")
    assert len(json.loads((tmp_path / "ledger.json").read_text())["entries"]) == 2


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_sequences_are_divided(method: str, tmp_path: Path) -> None:
    """The same weights as by ranks that each have whole sequences."""
    every = []
    for words in (["--mesh", "cp=2", "--context", method], []):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "roundelay", "run", "-n", "2",
             str(EXAMPLES / "train_gpt.py"), "--steps", "12", "--batch", "8",
             "--save", str(tmp_path / f"c{len(words)}"), "--out", str(tmp_path), *words],
            capture_output=True,
            encoding="utf-8",
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        every.append(rd.read_checkpoint(tmp_path / f"c{len(words)}").state_dict())
    for name, right in every[1].items():
        assert (every[0][name] - right).abs().max() < 1e-3, name


def test_a_mixture_of_experts_trains_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    script = [str(EXAMPLES / "train_moe.py"), "--steps", "8", "--batch", "6", "--experts", "5"]
    printed = []
    for launcher in ([], ["-m", "roundelay", "run", "-n", "3"]):
        done = subprocess.run(
            [sys.executable, "-W", "error", *launcher, *script, "--capacity", "1.5"],
            cwd=tmp_path, capture_output=True, encoding="utf-8", check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.replace("[0] ", "").splitlines())
    assert printed[0] == printed[1]
    losses = [float(re.findall(r"loss ([\d.]+)", line)[0]) for line in printed[0][:-1]]
    assert losses[-1] < losses[0]
    assert len(losses) == 8


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
    words = ["--ranks", "2", "--steps", "2", "--batch", "2", "--out", str(tmp_path)]

    def work() -> None:
        sys.argv = ["compare_strategies.py", *words, "--json", str(tmp_path / "t.json")]
        sys.path.insert(0, str(EXAMPLES))
        warnings.simplefilter("error")
        runpy.run_path(str(EXAMPLES / "compare_strategies.py"), run_name="__main__")

    # A fork: its ranks find loaded here what each would load of torch by itself.
    importlib.import_module("torch._dynamo")
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
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
