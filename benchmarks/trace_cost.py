"""What does a trace cost a call, a phase of training, and a step? With it and without, in turns.

Calls and phases on one rank, which waits for nobody, so that nothing but the call itself is timed:
the median over the rounds of what a round with it took longer than the one without. A step is one
of ZeRO-3, which has most events, of the smallest GPT of the examples on two ranks, whose steps are
the shortest: the same two models of the same ranks, by turns. Writes results/trace_cost.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

import roundelay as rd
from roundelay import _core
from roundelay.communicator import Communicator
from roundelay.communicator.tracing import start_trace
from roundelay.records import phase

RESULTS = Path(__file__).parent / "results"
ROUNDS, REPEATS = 200, 2000
STEP_ROUNDS, ROWS = 300, 16
STEP = "a step of ZeRO-3 of a GPT of 0.1 M parameters: processor time, on one of two ranks"
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))


def pair(comm: Communicator, folder: Path) -> tuple[Communicator, Communicator]:
    """Return two communicators of the same ranks: one made before the trace, and one after."""
    plain = comm.split(0)
    start_trace(comm, folder)
    traced = comm.split(0)
    if plain is None or traced is None:
        raise RuntimeError("a rank has no communicator")
    return plain, traced


def timed(
    call: Callable[[], object], repeats: int, clock: Callable[[], int] = time.perf_counter_ns
) -> float:
    """Return the nanoseconds of one call."""
    began = clock()
    for _ in range(repeats):
        call()
    return (clock() - began) / repeats


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


def stepped(comm: Communicator) -> Callable[[], None]:
    """Return what trains a GPT for one step, under ZeRO-3 on these ranks."""
    from gpt import GPT, SIZES  # noqa: PLC0415 - of the examples

    torch.manual_seed(0)
    model = GPT(SIZES["nano"])
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = rd.prepare(model, optimizer, strategy="zero3", comm=comm)
    rows = torch.randint(0, 256, (ROWS, SIZES["nano"].context + 1))

    def step() -> None:
        optimizer.zero_grad()
        found = model(rows[:, :-1]).flatten(0, 1)
        torch.nn.functional.cross_entropy(found, rows[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def steps(comm: Communicator, folder: str) -> dict[str, float]:
    """Return nanoseconds of a step without a trace and with one, and its events.

    Of the processor, in the thread that trains: steps wait for other ranks and for other programs,
    which a trace does not change, and which differ by more than all that it costs.
    """
    torch.set_num_threads(1)
    plain, traced = pair(comm, Path(folder))
    both = [stepped(one) for one in (plain, traced)]
    for one in both * 3:
        one()
    before = 0 if traced.trace is None else traced.trace.begun
    rounds = []
    for number in range(STEP_ROUNDS):
        times = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            plain.barrier()
            times[which] = timed(both[which], 1, time.thread_time_ns)
        rounds.append(times)
    events = 0 if traced.trace is None else traced.trace.begun - before
    more = statistics.median(on - off for off, on in rounds)
    off, on = (statistics.median(each) for each in zip(*rounds, strict=True))
    least = [min(each) for each in zip(*rounds, strict=True)]
    return {
        "off_ns": round(off), "on_ns": round(on), "more_ns": round(more),
        "events": round(events / STEP_ROUNDS, 1), "least_off_ns": round(least[0]),
        "least_on_ns": round(least[1]),
    }  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "trace_cost.json")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "`all_reduce` of 8 bytes, on one rank": rd.run(measure, 1, args=(folder,))[0],
            "a phase of training": phases(folder),
            STEP: rd.run(steps, 2, args=(f"{folder}/steps",))[0],
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
