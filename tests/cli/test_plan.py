"""`roundelay plan` as users run it: the table is the JSON, errors say the way out, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from roundelay.planning import gigabytes, large

Run = Callable[..., Result]
SEVEN = ("plan", "--params", "7.5e9", "--layers", "32", "--hidden", "4096")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_the_table_is_the_json(run: Run) -> None:
    asked = (*SEVEN, "--gpus", "64", "--memory", "80GB", "--network", "h100-ib")
    text = run(*asked).stdout
    found = json.loads(run(*asked, "--json").stdout)
    assert found["reason"] in text
    assert found["best"]["fits"]
    lines = [line for line in text.splitlines() if line[:1] == "│"][1:]
    assert len(lines) == len(found["options"])
    for line, one in zip(lines, found["options"], strict=True):
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        assert cells[1] == one["strategy"]
        for name, cell in zip(("parameters", "gradients", "optimizer", "activations", "transient",
                               "total"), cells[4:], strict=False):  # fmt: skip
            assert cell == gigabytes(one["bytes"][name])
        assert (cells[0] == "▸") is (one == found["best"])
        assert cells[10].startswith("+" if one["fits"] else "-")


def test_a_narrow_terminal_has_a_brief_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run(*SEVEN, "--gpus", "64", "--why", "--plot").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "│   step │" in text
    assert "tokens per second and GPU" in text


def test_ascii_is_ascii(run: Run) -> None:
    assert run(*SEVEN, "--gpus", "8", "--why", "--plot", "--ascii").stdout.isascii()


def test_nothing_fits(run: Run) -> None:
    result = run(*SEVEN, "--gpus", "1", "--memory", "16GB", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["best"] is None
    assert "Nothing fits in 16 GB. The nearest is" in result.stderr
    assert "GPUs of" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--params", "7.5 parsecs", "--gpus", "8"), "write 7.5e9, 7.5B or 125M"),
        (("--params", "-3", "--gpus", "8"), "write 7.5e9"),
        (("--params", "7B"), "--gpus"),
        (("--gpus", "8"), "params=, or by its layers= and hidden="),
        (("--params", "7B", "--gpus", "8", "--memory", "80 apples"), "not a size"),
        (("--params", "7B", "--gpus", "8", "--network", "h100"), "Did you mean 'h100-ib'?"),
        (("--params", "7B", "--gpus", "8", "--strategy", "zero4"), "Did you mean 'zero"),
        (("--params", "7B", "--gpus", "8", "--precision", "bf17"), "Did you mean 'bf16'?"),
        (("--params", "7B", "--gpus", "8", "--mesh", "tq=2"), "Did you mean 'tp'?"),
        (("--params", "7B", "--gpus", "8", "--mesh", "tp"), "name=value"),
        (("--params", "7B", "--gpus", "8", "--mesh", "tp=0"), "whole number from 1"),
        (("--params", "7B", "--gpus", "13", "--mesh", "tp=4"), "No mesh of 13 ranks with tp=4"),
        (("--params", "7B", "--layers", "2", "--hidden", "64", "--gpus", "8"), "do not go with"),
        (("--params", "7B", "--gpus", "8", "--plot", "curve.png"), "ends in .svg"),
        (("--params", "7B", "--gpus", "8", "--plot", "no/where.svg"), "no folder"),
        (("--model", "nowhere.py:make", "--gpus", "8"), "can't read nowhere.py, there is no such"),
        (("--model", "nowhere.py", "--gpus", "8"), "file and a function"),
        (("--params", "0", "--gpus", "8"), "'0' is not between 1 and 1e18"),
        (("--params", "1e30", "--gpus", "8"), "'1e30' is not between 1 and 1e18"),
        (("--params", "nan", "--gpus", "8"), "'nan' is not a number"),
        (("--params", "7B", "--gpus", "8", "--flops", "1e-300"), "not between 1 and 1e18"),
        (("--params", "7B", "--gpus", "8", "--flops", "inf"), "is not a number"),
        (("--params", "7B", "--gpus", "8", "--mfu", "nan"), "'nan' is not in the range 0<x<=1"),
        (("--params", "7B", "--gpus", "8", "--mfu", "inf"), "'inf' is not in the range 0<x<=1"),
        (("--params", "7B", "--gpus", "8", "--memory", "nan"), "not a size"),
        (("--params", "7B", "--gpus", "8", "--bucket", "inf"), "not a size"),
        (("--params", "7B", "--gpus", "8", "--mesh", "tp=nan"), "whole number from 1"),
        (("--params", "1", "--gpus", "8"), "1 parameter does not go with 1 layer of width 128"),
        (("--params", "1", "--gpus", "8"), "the smallest model that is guessed has 1 layer"),
        (("--params", "7B", "--vocab", "99999999999999", "--gpus", "8"), "A vocabulary of 999999"),
        (("--params", "7B", "--heads", "33", "--hidden", "4096", "--gpus", "8"), "32 say"),
        (("--params", "7B", "--gpus", "8", "--plot", "no/where.svg"), "--plot no/where.svg: there"),
        (("--layers", "1", "--hidden", "64", "--gpus", "1", "--mesh", "tp=2"), "No mesh of 1 rank"),
    ],
)
def test_mistakes_are_told(run: Run, words: tuple[str, ...], said: str) -> None:
    result = run("plan", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("params", ["7.5B", "1.3e8", "70e9", "175B", "1.1T"])
def test_what_would_fit_fits(run: Run, params: str) -> None:
    asked = ("plan", "--params", params, "--gpus", "8", "--rows", "0")
    said = run(*asked, "--memory", "1KB").stderr
    room = said.rpartition("GPUs of ")[2].strip().rstrip(".").replace(" ", "")
    assert run(*asked, "--memory", room).exit_code == 0, room


def test_one_is_not_many(run: Run) -> None:
    text = run("plan", "--layers", "1", "--hidden", "64", "--heads", "1", "--gpus", "1",
               "--sequence", "1", "--batch", "1").stdout  # fmt: skip
    assert "1 layer of width 64, 1 head, 1 token in a row; 1 row in a step" in text
    assert "1 GPU of" in text


MODELS = """
import sys
import torch

def ends():
    sys.exit(3)

def makes():
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
"""


def test_a_model_that_exits_is_told(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "models.py"
    file.write_text(MODELS, encoding="utf-8")
    result = run("plan", "--model", f"{file}:ends", "--gpus", "2")
    assert result.exit_code == 2
    assert "ended by exit(3), without a model" in result.stderr
    assert run("plan", "--model", f"{file}:makes", "--gpus", "2").exit_code == 0
    odd = run("plan", "--model", f"{file}:makes", "--heads", "3", "--hidden", "64",
              "--gpus", "2")  # fmt: skip
    assert odd.exit_code == 2
    assert "3 heads do not divide a width of 64" in odd.stderr


@pytest.mark.parametrize("number", [7_500_000_000, 123_512_345, 250_576, 1_235_000_000, 10**14 - 1])
def test_a_number_that_is_written_can_be_read(run: Run, number: int) -> None:
    told = run("plan", "--params", large(number), "--gpus", "1", "--memory", "1TB", "--json")
    assert json.loads(told.stdout)["model"]["params"] == number


def test_the_curve_as_a_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    result = run(*SEVEN, "--gpus", "64", "--plot", str(file), "--json")
    assert json.loads(result.stdout)["gpus"] == 64
    drawn = file.read_text(encoding="utf-8")
    assert drawn.startswith("<svg")
    for name in ("ddp", "zero3", "compute alone", "tokens per second and GPU"):
        assert name in drawn


def test_axes_can_be_fixed(run: Run) -> None:
    words = ("--mesh", "tp=2,pp=4", "--strategy", "zero1", "--micro-batch", "2", "--recompute",
             "full", "--precision", "fp32", "--batch", "512")  # fmt: skip
    found = json.loads(run(*SEVEN, "--gpus", "64", *words, "--json").stdout)
    for one in found["options"]:
        assert one["mesh"] == {"dp": 8, "tp": 2, "cp": 1, "pp": 4}
        assert (one["strategy"], one["micro_batch"]) == ("zero1", 2)
        assert (one["precision"], one["recompute"]) == ("fp32", "full")


def test_your_own_network(run: Run, tmp_path: Path) -> None:
    own = {"roundelay_cluster": 1, "name": "mine", "source": "measured", "per_host": 4,
           "latency": 1e-6, "bandwidth": 1e10, "nic_latency": 1e-5, "nic_bandwidth": 1e10,
           "reduce_bandwidth": 1e10}  # fmt: skip
    folder = tmp_path / "roundelay" / "networks"
    folder.mkdir(parents=True)
    (folder / "mine.json").write_text(json.dumps(own), encoding="utf-8")
    asked = (*SEVEN, "--gpus", "64", "--network", "mine")
    assert "Give --memory" in run(*asked).stderr
    assert "Give --flops" in run(*asked, "--memory", "80GB").stderr
    found = run(*asked, "--memory", "80GB", "--flops", "1e14", "--json")
    assert json.loads(found.stdout)["network"] == "mine"
    # The same network prices schedules.
    listed = json.loads(run("list", "all_reduce", "-n", "8", "--network", "mine", "--json").stdout)
    assert {row["network"] for row in listed} == {"mine"}


PROGRAM = """
import sys
for name in ("torch", "numpy"):
    sys.modules[name] = None
from roundelay.cli._group import roundelay
roundelay.main(["plan", "--params", "7.5e9", "--gpus", "64", "--why", "--plot"])
"""


def test_it_needs_neither_torch_nor_numpy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Best: " in done.stdout
