"""How large a pipeline's bubble is, beside the formula, when its stages cost alike.

Steps of a stack of equal layers on two ranks, and on four where there are as many cores, each with
cores of its own, under every schedule, turn and turn about in one run. A rank's work is the time in
which it computes; the bubble is the rest, from the first rank's first action to the last one's end.
`waits` is the part of it in which a rank waits for a message, `between` what it does between two
actions: hand on, and get ready to receive. `formula` is for stages that cost exactly alike, `price`
is the timeline with the costs that were measured. `quickest` is of the round that took least: what
else the machine does, a rank that is not let run, looks like a bubble too, and `load` tells of it.
Ranks keep the memory that they free: else the last stage, which frees its only micro-batch after
every backward pass, would get its pages anew in every forward pass, and stages would not cost
alike.
Writes results/pipeline.json.

    python benchmarks/pipeline.py
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import roundelay as rd
from roundelay import _core
from roundelay.pipelines import StageCosts, pipeline_called, price_pipeline

FILE = Path(__file__).parent / "results" / "pipeline.json"
RANKS = (2, 4)
LAYERS, WIDTH, ROWS = 64, 384, 128  # rows of a micro-batch
MICRO_BATCHES = (4, 8)
WORDS = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
ROUNDS = 15
TRIM_THRESHOLD, MMAP_THRESHOLD, EVER = -1, -3, 1 << 30  # of glibc's mallopt
Case = tuple[str, int]
Span = tuple[str, int, float, float]  # kind, stage, start, end
Step = tuple[list[Span], float]  # what a rank computed when, and how long it waited


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean square."""
    return ((output - target) ** 2).mean()


def be_rank(comm: rd.Communicator) -> dict[Case, list[Step]]:
    """Return what this rank computed when, in every round of every case."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[comm.rank :: comm.size])
    libc = ctypes.CDLL(None)
    for option in (TRIM_THRESHOLD, MMAP_THRESHOLD):
        libc.mallopt(option, EVER)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pipes: dict[Case, rd.Pipeline] = {}
    for count in MICRO_BATCHES:
        for word in WORDS:
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
            pipes[word, count] = rd.Pipeline(
                model, comm=comm, schedule=word, micro_batches=count, loss=loss_of
            )
    steps: dict[Case, list[Step]] = {case: [] for case in pipes}
    for number in range(ROUNDS + 2):
        for case, pipe in pipes.items():
            # Gradients of the batch are computed, too, as in a stage that is not the first.
            x = torch.ones(case[1] * ROWS, WIDTH, requires_grad=True)
            pipe.zero_grad()
            comm.barrier()
            pipe.step(x, x.detach())
            if number >= 2:  # noqa: PLR2004 - rounds to warm up
                spans = [(span.action.kind, span.action.stage, span.start, span.end)
                         for span in pipe.record.spans]  # fmt: skip
                steps[case].append((spans, pipe.record.waited))
    return steps


def bubble_of(ranks: Sequence[Step]) -> tuple[float, float, float]:
    """Return the share of the time in which ranks did not compute, in which they waited, and it."""
    took = max(span[3] for mine, _ in ranks for span in mine)
    took -= min(span[2] for mine, _ in ranks for span in mine)
    busy = sum(span[3] - span[2] for mine, _ in ranks for span in mine)
    waited = sum(each for _, each in ranks)
    return 1 - busy / (len(ranks) * took), waited / (len(ranks) * took), took


def priced(word: str, count: int, rounds: Sequence[Sequence[Step]]) -> float:
    """Return the bubble of the timeline with the costs that were measured."""
    times: dict[tuple[str, int], list[float]] = {}
    for ranks in rounds:
        for mine, _ in ranks:
            for kind, stage, start, end in mine:
                times.setdefault((kind, stage), []).append(end - start)
    cost = {key: statistics.median(each) for key, each in times.items()}
    schedule = pipeline_called(word)(len(rounds[0]), count)
    costs = [
        StageCosts(
            cost["forward", stage],
            cost.get(("backward", stage), cost.get(("input_grad", stage), 0.0)),
            cost.get(("weight_grad", stage), 0.0),
        )
        for stage in range(schedule.stages)
    ]
    return price_pipeline(schedule, costs).bubble


def summed_up(case: Case, rounds: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """Return the median bubble, the formula's, and that of the measured costs."""
    word, count = case
    seen = [bubble_of(ranks) for ranks in rounds]
    measured, waits, took = (statistics.median(each) for each in zip(*seen, strict=True))
    quickest = min(seen, key=lambda each: each[2])[0]
    formula = pipeline_called(word).bubble(len(rounds[0]), count)
    return {
        "milliseconds": round(1e3 * took, 2),
        "bubble": round(measured, 4),
        "formula": round(formula, 4),
        "price": round(priced(word, count, rounds), 4),
        "waits": round(waits, 4),
        "between": round(measured - waits, 4),
        "to_formula": round(measured / formula, 3),
        "quickest": round(quickest, 4),
        "quickest_to_formula": round(quickest / formula, 3),
    }


def main() -> None:
    """Measure, write the result and say it."""
    began, before = time.perf_counter(), os.getloadavg()[0]
    result: dict[str, Any] = {
        "command": "python benchmarks/pipeline.py",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": _core.available_cores(),
        "model": f"{LAYERS} layers of {WIDTH} x {WIDTH}, micro-batches of {ROWS} rows, float32",
        "rounds": ROUNDS,
        "bubbles": {},
    }
    for size in (size for size in RANKS if size <= _core.available_cores()):
        ranks = rd.run(be_rank, size)
        for case in ranks[0]:
            rounds = list(zip(*(mine[case] for mine in ranks), strict=True))
            name = f"{case[0]}, {size} stages, {case[1]} micro-batches"
            result["bubbles"][name] = summed_up(case, rounds)
            print(name, result["bubbles"][name], flush=True)
    result["load"] = [round(each, 1) for each in (before, os.getloadavg()[0])]
    FILE.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
