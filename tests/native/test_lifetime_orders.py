"""A sample of the random orders; `make sanitize` runs more of them, under sanitizers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_core = pytest.importorskip("roundelay._core")
if not hasattr(_core, "World"):
    pytest.skip("ranks of one host need Linux", allow_module_level=True)

ORDERS = Path(__file__).parent / "lifetime_orders.py"


def test_random_orders_of_close_drop_and_exit_are_clean() -> None:
    done = subprocess.run(
        [sys.executable, str(ORDERS), "0", "25"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "25 of 25 orders are clean" in done.stdout
