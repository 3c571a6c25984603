"""Attention over ranks: how much a zigzag saves, what passing keys on costs, and one rank's cost.

Causal attention in float32, forward and backward, with one thread for each rank. Ways are measured
in turn, in rounds; ratios are of the same round. Where ranks outnumber cores, times of ranks add
up, so the work of the slowest rank is also measured as the processor's time in its kernels. Writes
results/context_parallel.json.

    python benchmarks/context_parallel.py
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import roundelay as rd
from roundelay.parallel.context import ring
from roundelay.parallel.context.plan import LAYOUTS, RingPlan

FILE = Path(__file__).parent / "results" / "context_parallel.json"
ROUNDS = 5
HEADS, DIM = 4, 64
LENGTH = 8192
LONG_ON_GPU = 16384
BALANCED = 4  # ranks, among which layouts are compared
PAIR = 2

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def drawn(length: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Any]:
    """Return queries, keys and values."""
    draw = torch.Generator().manual_seed(0)
    three = [torch.randn(1, HEADS, length, DIM, generator=draw) for _ in range(3)]
    return [x.to(device, dtype).requires_grad_() for x in three]


def step(three: list[Any], attend: Attend) -> None:
    """Go forward and backward once."""
    out = attend(*three)
    torch.autograd.grad(out, three, torch.ones_like(out))


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend as torch does."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class KernelTime:
    """The processor's time that this rank spends in blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("block_forward", "block_backward"):
            setattr(ring, name, self.timed(getattr(ring, name)))

    def timed(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return the kernel, with its time added up."""

        def run(*args: Any) -> Any:
            began = time.thread_time()
            result = kernel(*args)
            self.seconds += time.thread_time() - began
            return result

        return run


def compare_layouts(comm: rd.Communicator) -> dict[str, list[list[float]]]:
    """Return, by layout and round, wall time and the slowest rank's time in kernels."""
    torch.set_num_threads(1)
    kernels = KernelTime()
    whole = [x.detach() for x in drawn(LENGTH)]
    shards = {
        layout: [rd.shard_sequence(x, comm, -2, layout=layout).requires_grad_() for x in whole]
        for layout in LAYOUTS
    }
    times: dict[str, list[list[float]]] = {layout: [] for layout in LAYOUTS}
    for number in range(ROUNDS + 1):
        for layout in LAYOUTS[:: 1 if number % 2 else -1]:
            comm.barrier()
            kernels.seconds, began = 0.0, time.perf_counter()
            step(shards[layout], lambda q, k, v, layout=layout: rd.attention(  # type: ignore[misc]
                q, k, v, comm=comm, causal=True, layout=layout))  # fmt: skip
            seconds = np.array([time.perf_counter() - began, kernels.seconds])
            comm.all_reduce(seconds, "max")
            if number:  # the first round is to get warm
                times[layout].append(seconds.tolist())
    return times


def pair(comm: rd.Communicator) -> dict[str, list[list[float]]]:
    """Return, by round, one rank's time for the whole and two ranks' by each method.

    Both as the clock has it, and as the processor's time of the busier rank.
    """
    torch.set_num_threads(1)
    three = drawn(LENGTH)
    shards = [rd.shard_sequence(x.detach(), comm, -2, layout="zigzag").requires_grad_()
              for x in three]  # fmt: skip
    times: dict[str, list[list[float]]] = {"alone": [], "ring": [], "ulysses": []}
    for number in range(ROUNDS + 1):
        for way, those in times.items():
            comm.barrier()
            began, worked = time.perf_counter(), time.process_time()
            if way != "alone":
                step(shards, lambda q, k, v, way=way: rd.attention(  # type: ignore[misc]
                    q, k, v, comm=comm, method=way, causal=True, layout="zigzag"))  # fmt: skip
            elif comm.rank == 0:
                step(three, plain)
            worked = time.process_time() - worked  # before waiting for the other, which may spin
            seconds = np.array([time.perf_counter() - began, worked])
            comm.all_reduce(seconds, "max")
            if number:
                those.append(seconds.tolist())
    return times


def one_rank(comm: rd.Communicator, device: str, length: int) -> dict[str, list[float]]:
    """Return, by round, the times of torch's own attention and of ours on one rank."""
    torch.set_num_threads(1)
    three = drawn(length, device, torch.float32 if device == "cpu" else torch.bfloat16)
    ways: dict[str, Attend] = {
        "plain": plain,
        "ours": lambda q, k, v: rd.attention(q, k, v, comm=comm, causal=True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for number in range(2 * ROUNDS + 1):
        for name in sorted(ways, reverse=bool(number % 2)):
            wait()
            began = time.perf_counter()
            step(three, ways[name])
            wait()
            if number:
                times[name].append(time.perf_counter() - began)
    return times


def ratio(some: list[float], others: list[float]) -> float:
    """Return the median of ratios within a round."""
    pairs = zip(some, others, strict=True)
    return round(statistics.median(mine / theirs for mine, theirs in pairs), 3)


def main() -> None:
    """Measure, write the result and say it."""
    load = os.getloadavg()[0]
    plans = {name: RingPlan.even(LENGTH, BALANCED, name, causal=True) for name in LAYOUTS}
    counted = {name: max(map(plan.work, range(BALANCED))) for name, plan in plans.items()}
    layouts = rd.run(compare_layouts, BALANCED)[0]
    two = rd.run(pair, PAIR)[0]
    alone = rd.run(one_rank, 1, args=("cpu", LENGTH // 4))[0]
    walls, works = ({name: [row[at] for row in rows] for name, rows in layouts.items()}
                    for at in range(2))  # fmt: skip
    result: dict[str, Any] = {
        "command": "python " + " ".join(["benchmarks/context_parallel.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_before": round(load, 1),  # where it is above the cores, times are not of ranks alone
        "tokens": LENGTH,
        "plain_ring_by_zigzag_on_4_ranks": {
            "pairs_of_the_slowest_rank": round(counted["contiguous"] / counted["zigzag"], 3),
            "kernel_seconds_of_the_slowest_rank": ratio(works["contiguous"], works["zigzag"]),
            "wall_seconds": ratio(walls["contiguous"], walls["zigzag"]),
        },
        "two_ranks_by_half_of_one": {
            way: {
                kind: ratio([row[at] for row in two[way]], [row[at] / PAIR for row in two["alone"]])
                for at, kind in enumerate(("wall_seconds", "processor_seconds_of_the_busier_rank"))
            }
            for way in ("ring", "ulysses")
        },
        "one_rank_by_plain": {"cpu": ratio(alone["ours"], alone["plain"])},
    }
    if torch.cuda.is_available():
        gpu = rd.run(one_rank, 1, "threads", args=("cuda", LONG_ON_GPU))[0]
        result["one_rank_by_plain"]["gpu"] = ratio(gpu["ours"], gpu["plain"])
    FILE.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
