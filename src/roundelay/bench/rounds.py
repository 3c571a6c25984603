"""Time contenders in turn on buffers that rotate and are rewritten, and check their results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from roundelay import _core
from roundelay.bench.messages import Spec, Timing
from roundelay.bench.workload import Buffers, Call, Workload
from roundelay.communicator import Communicator
from roundelay.reductions import Array

__all__ = ["Contender", "buffers_for", "memory_pass", "time_all"]

ROUNDS = 15
FEWEST_ROUNDS = 5  # where one call takes long
#: Calls before the clock counts, and seconds that they may take: libraries, ours too, find out
#: meanwhile what is quickest here.
FEWEST_WARM_UPS, MOST_WARM_UPS, WARM_UP_S = 3, 40, 1.5
MOST_CALLS = 2000  # in one round
#: How many buffers take turns, from so many bytes on.
IN_TURN = {32 << 20: 2, 1 << 20: 4, 0: 8}


@dataclass(frozen=True, slots=True)
class Contender:
    """Buffers, with a call on each of them, and what the inputs are rewritten with."""

    buffers: Sequence[Buffers]
    calls: Sequence[Call]
    source: Array


def buffers_for(nbytes: int) -> int:
    """Return how many buffers take turns, so that no call finds its data in the cache."""
    return next(count for least, count in IN_TURN.items() if nbytes >= least)


def time_all(
    comm: Communicator,
    work: Workload,
    contenders: Mapping[str, Contender],
    spec: Spec,
    *,
    unchecked: str,
) -> dict[str, Timing]:
    """Measure each contender in every round, one after the other; all ranks get the same.

    The one named `unchecked` does no collective, so its results are not compared.
    """
    wrong = {
        name: 0 if name == unchecked else _count_wrong(comm, work, contender)
        for name, contender in contenders.items()
    }
    one = {name: _warmed_up(comm, each) for name, each in contenders.items()}
    if spec.iterations:
        rounds = min(ROUNDS, spec.iterations)
        per_round = dict.fromkeys(contenders, -(-spec.iterations // rounds))
    else:
        rounds = int(min(max(spec.seconds / max(one.values()), FEWEST_ROUNDS), ROUNDS))
        wanted = {name: spec.seconds / rounds / took for name, took in one.items()}
        per_round = {name: int(min(max(each, 1), MOST_CALLS)) for name, each in wanted.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            times[name].append(_one_round(comm, contender, per_round[name]))
    return {
        name: Timing(statistics.median(took), min(took), rounds * per_round[name], wrong[name])
        for name, took in times.items()
    }


def _warmed_up(comm: Communicator, contender: Contender) -> float:
    """Return the seconds of one call, after enough of them."""
    took = _one_round(comm, contender, FEWEST_WARM_UPS)
    calls = min(max(WARM_UP_S / took, FEWEST_WARM_UPS), MOST_WARM_UPS)
    return _one_round(comm, contender, int(calls))


def _one_round(comm: Communicator, contender: Contender, calls: int) -> float:
    """Return the seconds of one call, the mean of many, on the slowest rank."""
    for buffers in contender.buffers[:calls]:
        np.copyto(buffers.input, contender.source)
    order = [contender.calls[at % len(contender.calls)] for at in range(calls)]
    comm.barrier()
    start = time.perf_counter()
    for call in order:
        call()
    took = (time.perf_counter() - start) / calls
    return float(comm.all_reduce(np.array([took]), op="max")[0])


def _count_wrong(comm: Communicator, work: Workload, contender: Contender) -> int:
    """Run once on every buffer and compare; return the sum over all ranks."""
    wrong = 0
    for buffers, call in zip(contender.buffers, contender.calls, strict=True):
        np.copyto(buffers.input, contender.source)
        if buffers.output is not buffers.input:
            buffers.output.fill(0)
        comm.barrier()
        call()
        wrong += work.count_wrong(buffers)
    return int(comm.all_reduce(np.array([wrong]))[0])


def memory_pass(size: int, nbytes: int) -> Contender:
    """Return the floor: a rank's read and write of `nbytes` of its own memory, in place.

    It is what each rank of an in-place all-reduce in the arena does, without the others: the same
    kernel reads N parts, `nbytes` in all, and writes what it folded to all N. Every byte is read
    once and written once, nobody waits, and nothing comes out of another core's cache. All ranks
    pass at once, on private buffers that rotate and are rewritten like everybody's.
    """
    arrays = [np.ones(nbytes, np.uint8) for _ in range(buffers_for(nbytes))]
    parts = max(2, size)  # of one alone there is nothing to fold
    each = nbytes // parts
    calls = []
    for array in arrays:
        cut = [array[part * each : (part + 1) * each] for part in range(parts)]
        calls.append(partial(_core.fold, "bor", "uint8", cut, cut))
    return Contender([Buffers(one, one) for one in arrays], calls, np.ones(nbytes, np.uint8))
