"""`roundelay view`: a recorded run in the terminal, and as files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

import roundelay as rd
from roundelay.communicator import Communicator

Run = Callable[..., Result]
FORMATS = [(".html", "<!doctype html>"), (".svg", "<svg"), (".json", '{"traceEvents"')]


def work(comm: Communicator) -> None:
    for _ in range(5):
        comm.all_reduce(np.ones(100))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a run of three ranks."""
    where = tmp_path_factory.mktemp("traces")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RD_TRACE", str(where))
        rd.run(work, 3)
    return where


def test_it_sums_up(run: Run, folder: Path) -> None:
    result = run("view", str(folder))
    assert result.exit_code == 0, result.stderr
    assert "3 ranks" in result.stdout
    rows = [line for line in result.stdout.splitlines() if "rank 0" in line or "rank 1" in line]
    assert rows
    assert run("view", "--ascii", str(folder)).stdout.isascii()


def test_as_json_it_has_every_rank(run: Run, folder: Path) -> None:
    told = json.loads(run("view", "--json", str(folder)).stdout)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1, 2]
    assert all(rank["calls"] >= 5 for rank in told["ranks"])


@pytest.mark.parametrize(("ending", "begins"), FORMATS)
def test_files(run: Run, folder: Path, tmp_path: Path, ending: str, begins: str) -> None:
    path = tmp_path / f"run{ending}"
    result = run("view", str(folder), "--out", str(path))
    assert result.exit_code == 0, result.stderr
    assert path.read_text(encoding="utf-8").startswith(begins)
    assert str(path) in result.stderr


def test_for_torch_s_analyzer(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("view", str(folder), "--flight-recorder", str(tmp_path / "f"))
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "f").iterdir()) == [
        f"nccl_trace_rank_{rank}" for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "x.txt"], "must end in .html"),
        (["--out", "/nowhere/x.html"], "no folder"),
        (["--step", "9"], "--step 9 is not in this record"),
    ],
)
def test_wrong_use(run: Run, folder: Path, words: list[str], said: str) -> None:
    result = run("view", str(folder), *words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_folder_without_traces(run: Run, tmp_path: Path) -> None:
    result = run("view", str(tmp_path))
    assert result.exit_code == 2
    assert "RD_TRACE=DIR" in result.stderr


def test_a_missing_rank_is_told(run: Run, folder: Path, tmp_path: Path) -> None:
    for rank in (0, 2):
        name = f"rank-{rank}.rdtrace"
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert "Of rank 1 there is no record here." in run("view", str(tmp_path)).stdout
