"""The programs of the frameworks: one word, or one line, is all that they say of us."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "frameworks.py"


@pytest.fixture(scope="module")
def frameworks() -> Iterator[Any]:
    sys.path.insert(0, str(FILE.parent))  # as for a script that is run
    spec = importlib.util.spec_from_file_location("frameworks_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["frameworks_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(FILE.parent))


def test_every_program_has_a_framework_and_a_result(frameworks: Any) -> None:
    there = {path.name for path in frameworks.PROGRAMS.glob("*.py")} - {"shared.py"}
    assert there == {one.program for one in frameworks.FRAMEWORKS}
    kept = json.loads(frameworks.RESULTS.read_text(encoding="utf-8"))
    assert [row["framework"] for row in kept["rows"]] == [one.name for one in frameworks.FRAMEWORKS]
    for row, framework in zip(kept["rows"], frameworks.FRAMEWORKS, strict=True):
        assert row["outcome"] == "passed", row
        assert row["line"] == framework.line
    assert kept["import_cost"]["name_ms"] < 0.01 * kept["import_cost"]["torch_ms"]


def test_no_program_speaks_of_roundelay_but_by_its_line(frameworks: Any) -> None:
    for path in frameworks.PROGRAMS.glob("*.py"):
        lines = [line for line in path.read_text().splitlines() if "roundelay" in line.lower()]
        allowed = 2 if path.name == "torchft_program.py" else 0  # which has a class for each
        assert len(lines) == allowed, (path.name, lines)


def test_what_fails_is_told_with_its_reason(frameworks: Any, monkeypatch: Any) -> None:
    def run(*_: Any, **__: Any) -> str:
        raise RuntimeError("exit 1: no such backend")

    monkeypatch.setattr(frameworks, "run", run)
    row = frameworks.row(frameworks.FRAMEWORKS[0], None)
    assert (row["outcome"], row["why"]) == ("failed", "exit 1: no such backend")


@pytest.mark.parametrize("broken", ["gloo", "roundelay"])
def test_what_fails_is_told_with_its_backend(
    frameworks: Any, monkeypatch: Any, broken: str
) -> None:
    """Gloo aborts now and then: its failures must not be taken for ours, or ours for gloo's."""

    def losses(_: Any, __: Any, backend: str) -> list[str]:
        if backend == broken:
            raise RuntimeError("exit 1: Signal 6")
        return ["0x1p0"]

    monkeypatch.setattr(frameworks, "run", lambda *_, **__: "2.13.0")
    monkeypatch.setattr(frameworks, "losses", losses)
    row = frameworks.row(frameworks.FRAMEWORKS[0], None)
    assert (row["outcome"], row["why"]) == ("failed", f"on {broken}: exit 1: Signal 6")


@pytest.mark.parametrize("said", [["0x1p0", "0x1p1"], ["0x1p0", "0x1.8p0"]])
def test_losses_that_differ_fail(frameworks: Any, monkeypatch: Any, said: list[str]) -> None:
    monkeypatch.setattr(frameworks, "run", lambda *_, **__: "2.13.0")
    monkeypatch.setattr(
        frameworks, "losses", lambda *given: said if given[2] == "gloo" else ["0x1p0", "0x1p1"]
    )
    row = frameworks.row(frameworks.FRAMEWORKS[0], None)
    assert row["outcome"] == ("passed" if said[1] == "0x1p1" else "failed")
