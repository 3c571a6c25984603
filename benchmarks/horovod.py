"""What does the negotiation cost? Small calls by `hvd`, beside plain ones of the communicator.

On 2, 3 and 4 ranks, in processes; every contender is called many times in a row, in turns with the
others; the median of the rounds is kept. Horovod itself does not build against torch 2.1 or newer,
so there is no peer. Writes results/horovod.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import roundelay.horovod.torch as hvd
from roundelay import _core
from roundelay.fronts.horovod.session import current
from roundelay.horovod import run

RESULTS = Path(__file__).parent / "results"
ROUNDS, REPEATS = 15, 100
MANY = 32  # tensors under way at once
GRADS, ELEMENTS = 64, 256  # of a step of an optimizer


def contenders() -> dict[str, Callable[[], object]]:
    """Return the calls to time, each on 16 bytes."""
    comm = current("benchmark").comm
    x, tensors = torch.ones(4), [torch.ones(4) for _ in range(MANY)]

    def many() -> None:
        begun = [hvd.allreduce_async_(t, name=str(n), op=hvd.Max) for n, t in enumerate(tensors)]
        for handle in begun:
            hvd.synchronize(handle)

    return {
        "comm.all_reduce": lambda: comm.all_reduce(x, "max"),
        "hvd.allreduce_": lambda: hvd.allreduce_(x, op=hvd.Max, name="x"),
        "hvd.allreduce": lambda: hvd.allreduce(x, op=hvd.Max, name="x"),
        "hvd.barrier": hvd.barrier,
        f"hvd.allreduce_async_, {MANY} at once, each": many,
    }


def optimizer_step() -> Callable[[], object]:
    """Return a step with many small gradients."""
    weights = [torch.nn.Parameter(torch.ones(ELEMENTS)) for _ in range(GRADS)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=0.0))
    ones = torch.ones(ELEMENTS)

    def step() -> None:
        torch.autograd.backward(weights, [ones] * GRADS)
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(every: dict[str, Callable[[], object]], times: dict[str, list[float]]) -> None:
    """Add a round of every call, in seconds."""
    for name, call in every.items():
        several = MANY if str(MANY) in name else 1
        repeats = max(1, REPEATS // (GRADS if str(GRADS) in name else several))
        hvd.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        times.setdefault(name, []).append((time.perf_counter() - began) / (repeats * several))


def measure() -> dict[str, float]:
    """Return microseconds of every call, and what a thread that waits burns of a core."""
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {}
    hvd.init()
    every = contenders() | {f"a step with {GRADS} gradients": optimizer_step()}
    for _ in range(ROUNDS):
        timed(every, times)
    found = {name: round(statistics.median(took) * 1e6, 1) for name, took in times.items()}
    began = sum(os.times()[:2])
    time.sleep(2.0)
    return found | {"idle, % of a core": round((sum(os.times()[:2]) - began) / 2.0 * 100, 2)}


def main() -> None:
    """Measure, print a table, and write it down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only-print", action="store_true", help="write no file")
    options = parser.parse_args()
    found = {ranks: run(measure, np=ranks)[0] for ranks in (2, 3, 4)}
    for name in found[2]:
        print(f"{name:44}" + "".join(f"{found[ranks][name]:12.1f}" for ranks in found))
    if options.only_print:
        return
    result = {
        "command": "python benchmarks/horovod.py",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": _core.available_cores(),
        "microseconds": found,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "horovod.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
