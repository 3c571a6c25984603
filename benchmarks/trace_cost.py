"""What does a trace cost a call, and a phase of training? With it and without, in turns.

On one rank, which waits for nobody, so that nothing but the call itself is timed: the median over
the rounds of what a round with it took longer than the one without. Writes results/trace_cost.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import roundelay as rd
from roundelay import _core
from roundelay.communicator import Communicator
from roundelay.launch.trace import start_trace
from roundelay.records import phase

RESULTS = Path(__file__).parent / "results"
ROUNDS, REPEATS = 200, 2000


def pair(comm: Communicator, folder: Path) -> tuple[Communicator, Communicator]:
    """Return two communicators of the same ranks: one made before the trace, and one after."""
    plain = comm.split(0)
    start_trace(comm, folder)
    traced = comm.split(0)
    if plain is None or traced is None:
        raise RuntimeError("a rank has no communicator")
    return plain, traced


def timed(call: Callable[[], object], repeats: int) -> float:
    """Return the nanoseconds of one call."""
    began = time.perf_counter_ns()
    for _ in range(repeats):
        call()
    return (time.perf_counter_ns() - began) / repeats


def measure(comm: Communicator, folder: str) -> dict[str, float]:
    """Return nanoseconds without a trace, with one, and by how much they differ in a round."""
    plain, traced = pair(comm, Path(folder))
    x = np.ones(2, np.float32)
    both = [partial(one.all_reduce, x, "max") for one in (plain, traced)]
    rounds: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        order = both if number % 2 else both[::-1]  # who comes first is no better off
        times = {}
        for call in order:
            plain.barrier()
            times[call] = timed(call, REPEATS)
        rounds.append((times[both[0]], times[both[1]]))
    more = statistics.median(on - off for off, on in rounds)
    off, on = (statistics.median(each) for each in zip(*rounds, strict=True))
    return {"off_ns": round(off, 1), "on_ns": round(on, 1), "more_ns": round(more, 1)}


def phases(folder: str) -> dict[str, float]:
    """Return nanoseconds of an empty phase of training, with a trace and without."""
    trace = _core.Trace(f"{folder}/phase.rdtrace", 0, 1, bytes(16))

    def one(of: _core.Trace | None) -> None:
        with phase(of, "step", number=1):
            pass

    rounds = [(timed(partial(one, None), REPEATS), timed(partial(one, trace), REPEATS))
              for _ in range(ROUNDS)]  # fmt: skip
    off, on = (statistics.median(each) for each in zip(*rounds, strict=True))
    return {"off_ns": round(off, 1), "on_ns": round(on, 1), "more_ns": round(on - off, 1)}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "trace_cost.json")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "`all_reduce` of 8 bytes, on one rank": rd.run(measure, 1, args=(folder,))[0],
            "a phase of training": phases(folder),
        }
    told = {
        "command": "python benchmarks/trace_cost.py",
        "python": platform.python_version(),
        "cores": _core.available_cores(),
        "nanoseconds": found,
    }
    out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
