"""ROUNDELAY_MAX_ISA: the newest instruction set that kernels use, for a machine that has less."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = "from roundelay import _core; print(*_core.instruction_sets(), _core.instruction_set())"


def shown(limit: str | None) -> tuple[list[str], str]:
    environment = {name: value for name, value in os.environ.items() if name != "ROUNDELAY_MAX_ISA"}
    if limit is not None:
        environment["ROUNDELAY_MAX_ISA"] = limit
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split(), done.stderr


@pytest.mark.parametrize("limit", ["", "sse2", "neon", "avx2", "avx512", "foo"])
def test_what_is_newer_than_the_limit_is_not_used(limit: str) -> None:
    (*sets, used), _ = shown(None)
    (*limited, active), said = shown(limit)
    known = sets.index(limit) if limit in sets else len(sets) - 1
    assert limited == sets[: known + 1]
    assert active == limited[-1]
    assert used == sets[-1]
    assert ("ROUNDELAY_MAX_ISA=foo" in said) == (limit == "foo")
