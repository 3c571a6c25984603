"""AMX that a CPU announces but that traps: there PyTorch's bf16 layers die of SIGILL.

Some virtual machines show the flags of AMX without being able to run it, and oneDNN, on which
PyTorch computes, believes the flags.
"""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

__all__ = ["CURE", "amx_traps", "announces_amx", "keep_off_amx", "why_illegal"]

VARIABLE, LIMIT = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
CURE = f"set {VARIABLE}={LIMIT} before the job starts, and PyTorch leaves AMX alone"
CPUINFO = Path("/proc/cpuinfo")
LAYER = """
import torch
x = torch.ones(128, 128, dtype=torch.bfloat16)
torch.nn.Linear(128, 128).bfloat16()(x).sum().backward()
"""
PROBE = [sys.executable, "-c", LAYER]
PROBE_S = 120.0


def announces_amx() -> bool:
    """Tell whether the CPU says that it has AMX."""
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return False
    return "amx_tile" in flags.split()


@functools.cache
def amx_traps() -> bool:
    """Tell whether a bf16 layer dies here, by having one die in a process of its own.

    Costs an import of PyTorch, once, and only where the CPU announces AMX.
    """
    if not announces_amx():
        return False
    try:
        done = subprocess.run(  # noqa: S603 - our own words
            PROBE,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=PROBE_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == -signal.SIGILL


def keep_off_amx(environment: MutableMapping[str, str]) -> None:
    """Have processes with this environment leave AMX alone if it traps; before they use PyTorch."""
    if amx_traps():
        environment[VARIABLE] = LIMIT


def why_illegal() -> str:
    """Say why a process may have died of SIGILL, and what to do."""
    if amx_traps():
        return f"this CPU announces AMX, but it traps, and PyTorch's bf16 layers use it: {CURE}"
    return (
        "it met an instruction that this CPU does not run. `roundelay doctor` looks for the cause."
    )
