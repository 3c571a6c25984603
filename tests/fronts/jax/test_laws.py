"""`rd.jax` keeps its laws: see `laws.py`, which states them, each for every rank of a world."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("jax") is None:
    pytest.skip("jax is not installed: pip install jax", allow_module_level=True)

HERE = Path(__file__).parent
DIFFERENTIATED = [
    *((name, op) for name in ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
      for op in ("sum", "avg", "prod", "min", "max") if op != "avg" or "scan" not in name),
    *((name, "sum") for name in ("broadcast", "all_gather", "gather", "scatter", "all_to_all")),
]  # fmt: skip


def broken(engine: str, sizes: list[int], *laws: str) -> dict[str, list[str]]:
    """Run laws in one program, since starting JAX takes long; return what does not hold."""
    done = subprocess.run(
        [sys.executable, str(HERE / "laws.py"), engine, ",".join(map(str, sizes)), *laws],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "4"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    assert found
    return {law: what for law, what in found.items() if what}


def test_values_on_threads(sample: Any) -> None:
    sizes = sample.some([1, 2, 3, 4], 4)
    laws = ("values", "eager", "control", "batches", "order", "exchanged", "training")
    assert broken("threads", sizes, *laws) == {}


@pytest.mark.timeout(600)
def test_gradients_on_threads(sample: Any) -> None:
    sizes = sample.some([1, 2, 3, 4], 4)
    grid = ",".join(f"{name}-{op}" for name, op in sample.cells(DIFFERENTIATED, 5))
    assert broken("threads", sizes, f"gradients:{grid}") == {}


def test_on_processes() -> None:
    assert broken("shared_memory", [2], "eager", "control", "order", "training") == {}


def test_by_python() -> None:
    """An engine that no program can call is called by Python, in the same order."""
    assert broken("gloo", [2], "eager", "order", "exchanged") == {}
