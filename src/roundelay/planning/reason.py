"""One sentence why a plan is the best, and where nothing fits, what would make it fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from roundelay.errors import RoundelayError
from roundelay.planning.candidate import STRATEGIES, Candidate, MeshShape, Task
from roundelay.planning.memory import fullest_rank
from roundelay.planning.search import PlanChoices, Planned, TrainingPlan, plan
from roundelay.planning.step_time import step_time

__all__ = ["advice", "described", "gigabytes", "large", "reason"]

MOST_GROWTH = 1 << 12  # times more ranks that are tried until something fits
NOTICED = 0.001  # of a step, or of bytes sent: a difference that is worth a word


def gigabytes(nbytes: float) -> str:
    """Write bytes in GB, as memory is sold: 10^9 bytes; small ones in MB or KB.

    >>> gigabytes(31_406_250_000), gigabytes(120e9), gigabytes(964_608)
    ('31.4 GB', '120 GB', '965 KB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(nbytes) >= size:
            value = nbytes / size
            return f"{value:.0f} {unit}" if abs(value) >= 99.95 else f"{value:.3g} {unit}"  # noqa: PLR2004 - three digits
    return f"{nbytes:.0f} B"


def large(number: float) -> str:
    """Write a large number as people type it.

    >>> large(7_500_000_000), large(120_576), large(1e12)
    ('7.5e9', '1.206e5', '1e12')
    """
    return f"{number:.4g}" if number < 1e4 else re.sub(r"\.?0*e\+0*", "e", f"{number:.3e}")  # noqa: PLR2004 - short


def described(candidate: Candidate) -> str:
    """Name a candidate: zero2 on dp=64, 2 rows at a time."""
    again = ", layers computed again" if candidate.recompute == "full" else ""
    rows = "1 row" if candidate.micro_batch == 1 else f"{candidate.micro_batch} rows"
    return f"{candidate.strategy} on {candidate.mesh}, {rows} at a time{again}"


def reason(found: TrainingPlan) -> str:
    """Return why the best is the best, in one sentence; empty where nothing fits."""
    best = found.best
    if best is None:
        return ""
    said = f"{described(best.candidate)}: fits with {gigabytes(best.spare)} to spare"
    others = list(_others(found.task, best))[:2]
    if others:
        others[-1] = f"and {others[-1]}"
    return f"{', '.join([said, *others])}."


def _others(task: Task, best: Planned) -> Iterator[str]:
    """Say what the nearest other ways would cost: first those that do not fit."""
    candidate = best.candidate
    if candidate.strategy not in STRATEGIES:
        return
    at = STRATEGIES.index(candidate.strategy)
    beside = [_like(task, replace(candidate, strategy=name)) for name in STRATEGIES]
    less = list(reversed(beside[:at]))  # that divide less
    for one in [one for one in less if one.fits and _slower(one, best) > NOTICED][:1]:
        yield f"{one.candidate.strategy} would take {_percent(_slower(one, best))} longer"
    for one in [one for one in less if not one.fits][:1]:
        yield f"{one.candidate.strategy} would need {gigabytes(one.bytes.total)}"
    for one in beside[at + 1 :]:
        more = one.time.sent / best.time.sent - 1 if best.time.sent else 0.0
        if more > NOTICED:
            much = f"{more + 1:.3g} times as much" if more > 1 else f"{_percent(more)} more"
            yield f"{one.candidate.strategy} would send {much}"
            break
    if candidate.mesh.dp < candidate.mesh.size:
        yield from _alone(task, best)


def _alone(task: Task, best: Planned) -> Iterator[str]:
    """Say why other axes than dp are there."""
    if task.batch % task.gpus:
        yield f"the batch of {task.batch} rows does not divide by dp={task.gpus}"
        return
    mesh = MeshShape(dp=task.gpus)
    alone = _like(task, replace(best.candidate, mesh=mesh, micro_batch=1))
    if not alone.fits:
        yield f"dp={task.gpus} would need {gigabytes(alone.bytes.total)}"
    elif _slower(alone, best) > NOTICED:
        yield f"dp={task.gpus} would take {_percent(_slower(alone, best))} longer"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"


def _slower(one: Planned, best: Planned) -> float:
    return one.time.total / best.time.total - 1


def _like(task: Task, candidate: Candidate) -> Planned:
    return Planned(candidate, fullest_rank(task, candidate), step_time(task, candidate),
                   task.memory, task.batch * task.sequence)  # fmt: skip


def advice(found: TrainingPlan, wanted: PlanChoices) -> str:
    """Say what is nearest where nothing fits, and what would make it fit."""
    near, memory = found.nearest, found.task.memory
    ways = list(_ways(found, wanted))
    return (
        f"Nothing fits in {gigabytes(memory)}. The nearest is {described(near.candidate)}, with "
        f"{gigabytes(near.bytes.total)}: {gigabytes(-near.spare)} too much. What would fit: "
        f"{'; '.join(ways)}."
    )


def _ways(found: TrainingPlan, wanted: PlanChoices) -> Iterator[str]:
    near, task = found.nearest, found.task
    if "full" not in wanted.recompute:
        again = _tried(task, replace(wanted, recompute=("full",)))
        if again is not None:
            yield f"--recompute full, {described(again.candidate)}"
    if tuple(wanted.strategies) != STRATEGIES:
        other = _tried(task, replace(wanted, strategies=STRATEGIES))
        if other is not None:
            yield f"another strategy, {described(other.candidate)}"
    optimizer = near.bytes.held.optimizer
    if near.bytes.total - optimizer <= task.memory:
        yield (f"the optimizer's {gigabytes(optimizer)} on the host, as "
               f'rd.Zero(offload="optimizer") does')  # fmt: skip
    times = 2
    while times <= MOST_GROWTH:
        more = replace(task, gpus=task.gpus * times, batch=task.batch * times)
        if (fitting := _tried(more, wanted)) is not None:
            yield f"{more.gpus} GPUs, {described(fitting.candidate)}"
            break
        times *= 2
    yield f"GPUs of {gigabytes(near.bytes.total)}"


def _tried(task: Task, wanted: PlanChoices) -> Planned | None:
    try:
        return plan(task, wanted).best
    except RoundelayError:  # no mesh of so many, or a precision that the cluster does not have
        return None
