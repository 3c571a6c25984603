"""What it costs to keep the optimizer's state, or all that a rank owns, on the host.

    python benchmarks/offload.py                     a GPT of 124 M parameters, bf16, one rank
    python benchmarks/offload.py --ranks 2           two ranks on the same GPU
    python benchmarks/offload.py --rows 8 --rows 64  rows of 1024 tokens in a step of each rank

Steps with and without `offload=` are taken turn and turn about in the same processes. Told are
medians of milliseconds, ratios of steps of the same round, and what each model leaves on the device
between steps. Writes results/offload.json. Without a GPU nothing moves; --size nano tries it there.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gpt import GPT, SIZES, loss_of

import roundelay as rd
from roundelay import _core

FILE = Path(__file__).parent / "results" / "offload.json"
VOCABULARY = 50304  # GPT-2's, rounded up
WARM = 3  # rounds that are not counted: ZeRO-3 learns its order, memory is pinned
#: What is measured, and beside what.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "zero2": ({"stage": 2}, ""),
    "zero2, optimizer": ({"stage": 2, "offload": "optimizer"}, "zero2"),
    "zero3": ({"stage": 3}, ""),
    "zero3, optimizer": ({"stage": 3, "offload": "optimizer"}, "zero3"),
    "zero3, parameters": ({"stage": 3, "offload": "parameters"}, "zero3"),
}
Step = Callable[[], None]


def stepper(comm: rd.Communicator, way: str, size: str, rows: int, device: str) -> tuple[Step, Any]:
    """Return what takes one step in this way, and the prepared model."""
    torch.manual_seed(0)
    model = GPT(SIZES[size], VOCABULARY).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    strategy = rd.Zero(**WAYS[way][0])
    model, optimizer = rd.prepare(model, optimizer, strategy=strategy, precision="bf16", comm=comm)
    drawn = torch.Generator().manual_seed(comm.rank)
    tokens = torch.randint(VOCABULARY, (rows, SIZES[size].context), generator=drawn).to(device)

    def step() -> None:
        loss_of(model, tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def be_rank(comm: rd.Communicator, size: str, rows: int, rounds: int) -> dict[str, Any]:
    """Measure as one rank: every step of every round, as the slowest rank saw it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cores = max(1, _core.available_cores() // comm.size)
    torch.set_num_threads(cores)
    steps, held, ledgers = {}, {}, {}
    gc.collect()  # models of other rows
    for way in WAYS:
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        step, model = stepper(comm, way, size, rows, device)
        for _ in range(WARM):
            step()
        now = torch.cuda.memory_allocated() if device == "cuda" else 0
        steps[way], held[way] = step, now - before
        line = rd.ledger(model).entries[comm.rank].measured
        ledgers[way] = {"all": line.total, "on_the_host": line.host}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    names = list(WAYS)
    for number in range(rounds):
        first = number % len(names)
        for way in names[first:] + names[:first]:
            comm.barrier()
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            steps[way]()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = np.array([time.perf_counter() - began])
            comm.all_reduce(seconds, "max")
            times[way].append(float(seconds[0]))
    return {"times": times, "held": held, "ledgers": ledgers, "device": told(device)}


def told(device: str) -> str:
    """Return what the model ran on."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def summed_up(found: dict[str, Any]) -> dict[str, Any]:
    """Return medians, and ratios of steps of the same round."""
    times = found["times"]
    ratios = {
        way: round(statistics.median(
            one / two for one, two in zip(times[way], times[beside], strict=True)), 3)
        for way, (_, beside) in WAYS.items()
        if beside
    }  # fmt: skip
    return {
        "milliseconds": {way: round(1e3 * statistics.median(one), 2) for way, one in times.items()},
        "ratio": ratios,
        "bytes_on_the_device_between_steps": found["held"],
        "ledger": found["ledgers"],
    }


def main() -> None:
    """Measure, write the result and say it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--size", default="gpt2")
    parser.add_argument("--rows", type=int, action="append", help="may be given several times")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/offload.py",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": _core.available_cores(),
        "ranks": args.ranks,
        "rounds": args.rounds,
        "size": args.size,
    }
    for rows in args.rows or [64, 128]:
        engine = "threads" if args.ranks == 1 else "shared_memory"
        found = rd.run(be_rank, args.ranks, engine, (args.size, rows, args.rounds), timeout=600)[0]
        result["device"] = found["device"]
        result[f"{rows}_rows"] = summed_up(found)
        print(rows, json.dumps(result[f"{rows}_rows"], indent=1), flush=True)
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
