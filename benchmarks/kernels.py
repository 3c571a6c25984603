"""How near to memory speed do folds run? Beside a plain copy and numpy's add, in the same run.

Bytes per second count every source read and every destination written once. Runs of all
contenders are interleaved, and the median of each is kept; at 4 KiB that is mostly the price of a
call from Python. Writes results/kernels.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from roundelay import _core

RESULTS = Path(__file__).parent / "results"
SIZES = {"4 KiB": 4 << 10, "256 KiB": 256 << 10, "64 MiB": 64 << 20}
DTYPES = ("float32", "float64", "bfloat16")
SOURCES = (2, 4)
ROUNDS = 15
#: Bytes that each contender moves in a round: small buffers are folded many times over.
BYTES_PER_ROUND = 32 << 20

Bytes = npt.NDArray[np.uint8]


def contenders(dst: Bytes, srcs: list[Bytes]) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return what to time, by name: how many buffers it touches, and the call."""
    made: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, partial(np.copyto, dst, srcs[0])),
    }
    for dtype in ("float32", "float64"):
        left, right, out = (array.view(dtype) for array in (srcs[0], srcs[1], dst))
        made[f"numpy add {dtype}"] = (3, partial(np.add, left, right, out))
    for dtype in DTYPES:
        for count in SOURCES:
            call = partial(_core.fold, "sum", dtype, [dst], srcs[:count])
            made[f"fold {dtype} {count} sources"] = (count + 1, call)
    return made


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the time of one call, the mean of `repeats` in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def measure(size: int) -> dict[str, float]:
    """Return GB/s of every contender on buffers of `size` bytes."""
    dst = np.zeros(size, np.uint8)
    srcs = [np.full(size, 1 + source, np.uint8) for source in range(max(SOURCES))]
    calls = contenders(dst, srcs)
    repeats = max(1, BYTES_PER_ROUND // size // 4)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, (_, call) in calls.items():
            times[name].append(seconds(call, repeats))
    return {
        name: round(buffers * size / statistics.median(times[name]) / 1e9, 2)
        for name, (buffers, _) in calls.items()
    }


def main() -> None:
    """Measure, print a table, and write it down."""
    rates = {label: measure(size) for label, size in SIZES.items()}
    result = {
        "command": "python benchmarks/kernels.py",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "instruction_set": _core.instruction_set(),
        "gigabytes_per_second": rates,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "kernels.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"GB/s on {_core.instruction_set():24}" + "".join(f"{label:>10}" for label in rates))
    for name in next(iter(rates.values())):
        print(f"{name:32}" + "".join(f"{rate[name]:10.1f}" for rate in rates.values()))


if __name__ == "__main__":
    main()
