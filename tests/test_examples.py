"""Every example runs, and prints what it says it prints."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import re
import runpy
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

import roundelay as rd
from roundelay.networks import load_network
from roundelay.schedule import load

EXAMPLES = Path(__file__).parent.parent / "examples"
#: Those of other libraries, which tests/fronts runs where they are installed.
OF_FRONTS = [EXAMPLES / "17_ray.py"]
SCRIPTS = [path for path in sorted(EXAMPLES.glob("[0-9]*.py")) if path not in OF_FRONTS]
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


def on_ranks(ranks: int, script: str, *words: object) -> str:
    """Run an example on ranks that are forks; return what rank 0 printed.

    They find loaded here what each would load of torch by itself, which takes seconds.
    """
    importlib.import_module("torch._dynamo")

    def work(comm: rd.Communicator) -> str:
        torch.set_num_threads(1)
        sys.argv = [script, *map(str, words)]
        sys.path.insert(0, str(EXAMPLES))
        vars(rd)["init"] = lambda: comm
        warnings.simplefilter("error")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return printed.getvalue()

    printed: list[str] = rd.run(work, ranks)
    return printed[0]


def launched(tmp_path: Path) -> str:
    """Run the main job as a user does."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "roundelay", "run", "-n", "2",
         str(EXAMPLES / "train_gpt.py"), *map(str, main_job("ddp", tmp_path))],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def main_job(strategy: str, out: Path) -> list[object]:
    return ["--size", "nano", "--steps", 12, "--batch", 8, "--micro-batch", 2,
            "--strategy", strategy, "--out", out]  # fmt: skip


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_main_job_learns_and_accounts_for_it(strategy: str, tmp_path: Path) -> None:
    if strategy == "ddp":
        printed = launched(tmp_path)
    else:
        printed = on_ranks(2, "train_gpt.py", *main_job(strategy, tmp_path))
    first, last = re.findall(r"loss ([\d.]+) → ([\d.]+) in 12 steps", printed)[0]
    assert float(last) < float(first)
    assert "It writes:" in printed
    assert f"{strategy}, 12 steps: predicted / measured" in printed
    assert (tmp_path / "loss.svg").read_text().startswith("<svg")
    assert len(json.loads((tmp_path / "ledger.json").read_text())["entries"]) == 2


def test_sequences_are_divided(tmp_path: Path) -> None:
    """The same weights as by ranks that each have whole sequences."""
    every = {}
    for method in ("whole", "ring", "ulysses"):
        words = [] if method == "whole" else ["--mesh", "cp=2", "--context", method]
        on_ranks(2, "train_gpt.py", "--steps", 12, "--batch", 8,
                 "--save", tmp_path / method, "--out", tmp_path, *words)  # fmt: skip
        every[method] = rd.read_checkpoint(tmp_path / method).state_dict()
    for name, right in every["whole"].items():
        for method in ("ring", "ulysses"):
            assert (every[method][name] - right).abs().max() < 1e-3, (method, name)


def test_a_mixture_of_experts_trains_alike_on_any_number_of_ranks() -> None:
    words = ["--steps", 8, "--batch", 6, "--experts", 5, "--capacity", 1.5]
    printed = [on_ranks(ranks, "train_moe.py", *words).splitlines() for ranks in (1, 3)]
    assert printed[0] == printed[1]
    losses = [float(re.findall(r"loss ([\d.]+)", line)[0]) for line in printed[0][:-1]]
    assert losses[-1] < losses[0]
    assert len(losses) == 8


@pytest.mark.parametrize(
    "line",
    [
        "train_gpt.py --steps 0", "train_gpt.py --mesh tp=0", "train_gpt.py --mesh tp",
        "train_gpt.py --mesh dp=1,dp=1", "train_gpt.py --mesh xp=1", "train_gpt.py --text SHORT",
        "train_moe.py --text SHORT", "train_moe.py --batch 0", "train_moe.py --experts -1",
    ],
)  # fmt: skip
def test_odd_options_are_refused_in_a_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short").write_text("hi")
    script, *words = line.replace("SHORT", str(tmp_path / "short")).split()
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def body(comm: rd.Communicator) -> None:
        monkeypatch.setitem(vars(rd), "init", lambda: comm)
        with contextlib.redirect_stderr(io.StringIO()), pytest.raises(SystemExit) as caught:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        assert caught.value.code not in (0, None)

    rd.run(body, 1, "threads")


@pytest.mark.parametrize("mesh", ["dp=2,pp=2", "tp=2,pp=2"])
def test_the_main_job_learns_in_stages(mesh: str, tmp_path: Path) -> None:
    printed = on_ranks(4, "train_gpt.py", "--mesh", mesh, "--pipeline", "1f1b",
                       "--steps", 20, "--batch", 8, "--micro-batches", 2,
                       "--out", tmp_path)  # fmt: skip
    first, last = re.findall(r"loss ([\d.]+) → ([\d.]+) in 20 steps", printed)[0]
    assert float(last) < float(first)
    assert "2 stages on 2 ranks" in printed


def test_strategies_are_compared(tmp_path: Path) -> None:
    words = ["--ranks", 2, "--steps", 2, "--batch", 2, "--out", tmp_path]
    # Ranks of its own: it starts a world for every strategy.
    on_ranks(1, "compare_strategies.py", *words, "--json", tmp_path / "t.json")
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
    known = {
        *SCRIPTS,
        *OF_FRONTS,
        *PROGRAMS,
        *EXAMPLES.glob("schedules/*"),
        *EXAMPLES.glob("networks/*"),
    }
    files = {
        path for path in EXAMPLES.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    }
    assert files == known
