"""What does saving cost training? Steps with no save, with one beside them, and with one first.

Steps of a GPT with AdamW on two ranks. A round is three stretches of twenty steps, in turn, each
from another one on: without a save, after `rd.save(…, wait=False)`, after `rd.save(…)`. The second
also waits until the checkpoint is complete. Writes results/checkpoint.json.

    python benchmarks/checkpoint.py              ddp and zero2
    python benchmarks/checkpoint.py ddp          one of them, the others stay as they are
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import roundelay as rd
from roundelay import _core

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, SIZES, loss_of

FILE = Path(__file__).parent / "results" / "checkpoint.json"
RANKS = 2
STEPS = 20
ROUNDS = 7
TOKENS = (4, 128)  # rows and their lengths, of every rank in a step
STRATEGIES = ("ddp", "zero2")
WAYS = ("none", "beside", "waiting")


def be_rank(comm: rd.Communicator, strategy: str, folder: str) -> dict[str, list[float]]:
    """Measure as one rank: every stretch of every round, as the slowest rank saw it."""
    torch.set_num_threads(1)
    torch.manual_seed(comm.rank)
    tokens = torch.randint(0, 256, TOKENS)
    model = GPT(SIZES["medium"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = rd.prepare(model, optimizer, strategy=strategy, comm=comm)
    times: dict[str, list[float]] = {name: [] for name in (*WAYS, "call")}
    for number in range(ROUNDS + 1):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            comm.barrier()
            began = time.perf_counter()
            saving = None
            if way != "none":
                saving = rd.save(f"{folder}/{way}", model, optimizer, wait=way == "waiting")
            called = time.perf_counter() - began
            for _ in range(STEPS):
                loss_of(model, tokens, tokens).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            if saving is not None:
                saving.wait()
            seconds = np.array([time.perf_counter() - began, called])
            comm.all_reduce(seconds, "max")
            if number > 0:  # the first round is to get warm
                times[way].append(float(seconds[0]))
                if way == "beside":
                    times["call"].append(float(seconds[1]))
    return times


def summed_up(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and ratios of stretches of the same round."""

    def cost(way: str) -> float:
        pairs = zip(times[way], times["none"], strict=True)
        return round(100 * (statistics.median(one / two for one, two in pairs) - 1), 2)

    step = statistics.median(times["none"]) / STEPS
    return {
        "milliseconds": {
            "step": round(1e3 * step, 1),
            "call": round(1e3 * statistics.median(times["call"]), 1),
        },
        "percent_of_training": {way: cost(way) for way in WAYS[1:]},
    }


def main() -> None:
    """Measure, write the result and say it."""
    result = json.loads(FILE.read_text()) if FILE.exists() else {}
    result |= {
        "command": "python benchmarks/checkpoint.py",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": _core.available_cores(),
        "ranks": RANKS,
        "rounds": ROUNDS,
        "steps_between_saves": STEPS,
        "parameters": sum(one.numel() for one in GPT(SIZES["medium"]).parameters()),
    }
    for strategy in sys.argv[1:] or STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            times = rd.run(lambda comm: be_rank(comm, strategy, folder), RANKS)[0]  # noqa: B023
        result[strategy] = summed_up(times)
        print(strategy, json.dumps(result[strategy], indent=1), flush=True)
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
