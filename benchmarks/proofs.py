"""How long does certainty take? Prove every algorithm and its programs; price a large ring.

Asked of every release: all proofs for sizes 1 to 16 and every root in under 30 s, the price of a
ring all-reduce on 256 ranks in under 1 s. Writes results/proofs.json.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path

from roundelay.algorithms import algorithms
from roundelay.networks import networks
from roundelay.schedule import compile_schedule, price, prove, prove_program

RESULTS = Path(__file__).parent / "results"


def prove_everything(sizes: range) -> int:
    """Prove all schedules and their programs; return how many."""
    count = 0
    for algorithm in algorithms:
        for size in sizes:
            for root in range(size if algorithm.collective.rooted else 1):
                schedule = algorithm.schedule(size, root)
                prove(schedule)
                prove_program(compile_schedule(schedule))
                count += 1
    return count


def main() -> None:
    """Measure, write the result and say it."""
    start = time.perf_counter()
    count = prove_everything(range(1, 17))
    proved = time.perf_counter()
    ring = algorithms.load("all_reduce_ring").schedule(256)
    cost = price(ring, 64 << 20, network=networks.load("switch")(256))
    priced = time.perf_counter()
    result = {
        "command": "python benchmarks/proofs.py",
        "python": platform.python_version(),
        "schedules_proved": count,
        "proof_seconds": round(proved - start, 2),
        "price_256_seconds": round(priced - proved, 2),
        "price_256_steps": len(cost.steps),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "proofs.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"{count} schedules and their programs proved in {result['proof_seconds']} s (limit 30)")
    print(f"ring all-reduce of 256 ranks priced in {result['price_256_seconds']} s (limit 1)")


if __name__ == "__main__":
    main()
