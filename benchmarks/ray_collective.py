"""What does `ray.util.collective` gain by ROUNDELAY? The same actors, against Ray's GLOO.

Both groups reduce float32 arrays in the same two actors of a local Ray, in turns; a turn takes as
long as its slowest rank, and the median of all turns counts. Needs `roundelay[ray,torch]`; where
Ray is not installed it says so and writes nothing. Writes results/ray_collective.json.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import roundelay as rd
from roundelay import _core

RESULTS = Path(__file__).parent / "results"
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 8 << 20)
RANKS = 2
GROUPS = {"roundelay": "ours", "gloo": "default"}  # GLOO of another name needs a default one
BUDGET_S = 5.0  # for the turns of one size
LEAST_TURNS, MOST_TURNS = 5, 300


class Contender:
    """One rank, in both groups."""

    def meet(self, rank: int) -> None:
        """Make the groups."""
        import ray.util.collective as col  # noqa: PLC0415 - in the actor

        rd.ray.register()
        for backend, name in GROUPS.items():
            col.init_collective_group(RANKS, rank, backend, name)

    def measure(self, nbytes: int) -> dict[str, float]:
        """Return the median microseconds of each, the same on every rank."""
        import ray.util.collective as col  # noqa: PLC0415 - in the actor

        array, taken = np.ones(nbytes // 4, np.float32), {name: list[float]() for name in GROUPS}
        began = time.perf_counter()
        for turn in range(MOST_TURNS):
            for backend, name in GROUPS.items():
                array.fill(1)
                col.barrier("ours")
                start = time.perf_counter()
                col.allreduce(array, name)
                seconds = np.array([time.perf_counter() - start])
                col.allreduce(seconds, "ours", col.types.ReduceOp.MAX)
                taken[backend].append(float(seconds[0]))
                if not np.all(array == RANKS):
                    raise SystemExit(f"{backend}: a wrong sum")
            spent = np.array([time.perf_counter() - began])
            col.allreduce(spent, "ours", col.types.ReduceOp.MAX)
            if turn + 1 >= LEAST_TURNS and spent[0] > BUDGET_S:
                break
        return {name: round(1e6 * statistics.median(each[1:]), 1) for name, each in taken.items()}


def measured() -> list[dict[str, Any]]:
    """Return a row for every size."""
    import ray  # noqa: PLC0415 - which may not be there

    ray.init(num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
    try:
        actors = [ray.remote(Contender).remote() for _ in range(RANKS)]
        ray.get([actor.meet.remote(rank) for rank, actor in enumerate(actors)])
        rows = []
        for nbytes in SIZES:
            found = ray.get([actor.measure.remote(nbytes) for actor in actors])[0]
            rows.append({"bytes": nbytes, "microseconds": found})
            print(rows[-1], flush=True)
        return rows
    finally:
        ray.shutdown()


def main() -> None:
    """Measure, say it, and write it."""
    if importlib.util.find_spec("ray") is None:
        print("Ray is not installed: pip install 'roundelay[ray,torch]'")
        return
    import ray  # noqa: PLC0415 - it is there

    result = {
        "command": "python benchmarks/ray_collective.py",
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": _core.instruction_set(),
        "ranks": RANKS,
        "versions": {"ray": ray.__version__},
        "load": round(os.getloadavg()[0], 1),
        "all_reduce": measured(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "ray_collective.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
