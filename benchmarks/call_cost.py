"""What does a call on a tensor cost beside one on a numpy array? 8 bytes, from Python.

On one rank, which waits for nobody, and on two. Every contender is called many times in a row, in
turns with the others; the median of the rounds is kept. Writes results/call_cost.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import roundelay as rd
from roundelay import _core
from roundelay.communicator import Communicator

RESULTS = Path(__file__).parent / "results"
WORLDS = ((1, "threads"), (2, "threads"), (2, "shared_memory"))
ROUNDS, REPEATS = 60, 300

Call = Callable[[], object]


def kinds() -> dict[str, Callable[[tuple[int, ...]], Any]]:
    """Return what makes 8 bytes, or as many for each rank, of every kind."""
    return {
        "numpy": partial(np.ones, dtype=np.float32),
        "torch": partial(torch.ones, dtype=torch.float32),
        "torch bfloat16": lambda shape: torch.ones((*shape[:-1], 4), dtype=torch.bfloat16),
    }


def calls(comm: Communicator) -> dict[str, dict[str, Call]]:
    """Return the calls to time, and each on every kind of array."""
    found: dict[str, dict[str, Call]] = {}
    for kind, ones in kinds().items():
        x, out, rows, other = ones((2,)), ones((2,)), ones((comm.size, 2)), ones((comm.size, 2))
        made: dict[str, Call] = {
            "all_reduce": partial(comm.all_reduce, x, "max"),
            "all_reduce(out=)": partial(comm.all_reduce, x, out=out),
            "broadcast": partial(comm.broadcast, x),
            "reduce": partial(comm.reduce, x, "max"),
            "scan": partial(comm.scan, x, "max"),
            "reduce(out=)": partial(comm.reduce, x, out=out),
            "scan(out=)": partial(comm.scan, x, out=out),
            "all_gather(out=)": partial(comm.all_gather, x, out=other),
            "gather(out=)": partial(comm.gather, x, out=other),
            "scatter(out=)": partial(comm.scatter, rows, out=out),
            "reduce_scatter(out=)": partial(comm.reduce_scatter, rows, out=out),
            "all_to_all(out=)": partial(comm.all_to_all, rows, out=other),
            "barrier": comm.barrier,
            "all_gather": partial(comm.all_gather, x),
            "reduce_scatter": partial(comm.reduce_scatter, rows),
            "all_to_all": partial(comm.all_to_all, rows),
        }
        for name, call in made.items():
            found.setdefault(name, {})[kind] = call
    return found


def measure(comm: Communicator) -> dict[str, dict[str, float]]:
    """Return microseconds of every call on every kind of array, as this rank sees them."""
    every = calls(comm)
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for name, contenders in every.items():
            for kind, call in contenders.items():
                comm.barrier()
                began = time.perf_counter()
                for _ in range(REPEATS):
                    call()
                took = (time.perf_counter() - began) / REPEATS
                times.setdefault((name, kind), []).append(took)
    return {
        name: {kind: round(statistics.median(times[name, kind]) * 1e6, 2) for kind in contenders}
        for name, contenders in every.items()
    }


def main() -> None:
    """Measure, print a table, and write it down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only-print", action="store_true", help="write no file")
    options = parser.parse_args()
    worlds = []
    for ranks, engine in WORLDS:
        found = rd.run(measure, ranks, engine)[0]
        worlds.append({"ranks": ranks, "engine": engine, "microseconds": found})
        print(f"\n{f'{ranks} {engine}, µs':24}" + "".join(f"{kind:>16}" for kind in kinds()))
        for name, row in found.items():
            print(f"{name:24}" + "".join(f"{row[kind]:16.2f}" for kind in kinds()))
    if options.only_print:
        return
    result = {
        "command": "python benchmarks/call_cost.py",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "cores": _core.available_cores(),
        "worlds": worlds,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "call_cost.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
