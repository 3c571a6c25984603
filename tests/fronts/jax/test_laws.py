"""`rd.jax` keeps its laws: see `laws.py`, which states them, each for every rank of a world."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

if importlib.util.find_spec("jax") is None:
    pytest.skip("jax is not installed: pip install jax", allow_module_level=True)

HERE = Path(__file__).parent
LAWS = (
    "values", "eager", "control", "batches", "order", "exchanged", "gradients", "training",
)  # fmt: skip
#: As threads, of which one process compiles for all; as processes, for what is different there.
WORLDS = {"threads": "1,2,3", "shared_memory": "2"}
BRIEF = ("eager", "control", "order", "exchanged", "training")


@cache
def broken(engine: str) -> dict[str, list[str]]:
    """Run all laws of an engine in one program: starting JAX is what takes long."""
    laws = LAWS if engine == "threads" else BRIEF
    done = subprocess.run(
        [sys.executable, str(HERE / "laws.py"), engine, WORLDS[engine], *laws],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("law", LAWS)
def test_on_threads(law: str) -> None:
    for size in WORLDS["threads"].split(","):
        assert broken("threads")[f"{law} {size}"] == []


@pytest.mark.parametrize("law", BRIEF)
def test_on_processes(law: str) -> None:
    assert broken("shared_memory")[f"{law} 2"] == []
