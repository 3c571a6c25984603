"""Time contenders in turn on buffers that rotate and are rewritten, and check their results."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roundelay.bench.messages import Spec, Timing
from roundelay.bench.ours import Call
from roundelay.bench.work import Buffers, Work
from roundelay.communicator import Communicator
from roundelay.reductions import Array

__all__ = ["Contender", "buffers_for", "memory_seconds", "time_all"]

ROUNDS = 15
WARM_UPS = 3
MOST_CALLS = 2000  # in one round
MANY, FEW = 8, 4  # buffers that take turns
FEW_FROM = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Contender:
    """Buffers, with a call on each of them."""

    buffers: Sequence[Buffers]
    calls: Sequence[Call]


def buffers_for(nbytes: int) -> int:
    """Return how many buffers take turns, so that no call finds its data in the cache."""
    return FEW if nbytes >= FEW_FROM else MANY


def time_all(
    comm: Communicator, work: Work, contenders: Mapping[str, Contender], spec: Spec
) -> dict[str, Timing]:
    """Measure each contender in every round, one after the other; all ranks get the same."""
    source = work.make().input
    wrong = {name: _count_wrong(comm, work, one, source) for name, one in contenders.items()}
    per_round, rounds = {}, ROUNDS if spec.iterations == 0 else min(ROUNDS, spec.iterations)
    for name, one in contenders.items():
        if spec.iterations:
            per_round[name] = -(-spec.iterations // rounds)
        else:
            wanted = spec.seconds / rounds / _one_round(comm, one, source, WARM_UPS)
            per_round[name] = int(min(max(wanted, 1), MOST_CALLS))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, one in contenders.items():
            times[name].append(_one_round(comm, one, source, per_round[name]))
    return {
        name: Timing(statistics.median(took), min(took), rounds * per_round[name], wrong[name])
        for name, took in times.items()
    }


def _one_round(comm: Communicator, contender: Contender, source: Array, calls: int) -> float:
    """Return the seconds of one call, the mean of many, on the slowest rank."""
    for buffers in contender.buffers[:calls]:
        np.copyto(buffers.input, source)
    order = [contender.calls[at % len(contender.calls)] for at in range(calls)]
    comm.barrier()
    start = time.perf_counter()
    for call in order:
        call()
    took = (time.perf_counter() - start) / calls
    return float(comm.all_reduce(np.array([took]), op="max")[0])


def _count_wrong(comm: Communicator, work: Work, contender: Contender, source: Array) -> int:
    """Run once on every buffer and compare; return the sum over all ranks."""
    wrong = 0
    for buffers, call in zip(contender.buffers, contender.calls, strict=True):
        np.copyto(buffers.input, source)
        if buffers.output is not buffers.input:
            buffers.output.fill(0)
        comm.barrier()
        call()
        wrong += work.count_wrong(buffers)
    return int(comm.all_reduce(np.array([wrong]))[0])


def memory_seconds(comm: Communicator, nbytes: int) -> float:
    """Return in how many seconds every rank, pinned, reads and writes `nbytes` in place once."""
    usual = os.sched_getaffinity(0)
    cores = sorted(usual)
    arrays = [np.ones(-(-nbytes // 8), np.uint64) for _ in range(buffers_for(nbytes))]
    order = arrays * max(1, int(FEW_FROM // max(nbytes, 1)))
    took = []
    # 0 is this thread, not its process: ranks that are threads are pinned one by one, too.
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    try:
        for _ in range(ROUNDS):
            comm.barrier()
            start = time.perf_counter()
            for array in order:
                np.invert(array, out=array)
            seconds = (time.perf_counter() - start) / len(order)
            took.append(float(comm.all_reduce(np.array([seconds]), op="max")[0]))
    finally:
        os.sched_setaffinity(0, usual)
    return statistics.median(took)
