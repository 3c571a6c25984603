"""One sentence why a plan is the best, and where nothing fits, what would make it fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from roundelay.errors import RoundelayError
from roundelay.language import Language, say
from roundelay.planning.candidate import STRATEGIES, Candidate, MeshShape, Task
from roundelay.planning.memory import fullest_rank
from roundelay.planning.model import counted
from roundelay.planning.search import PlanChoices, Planned, TrainingPlan, plan
from roundelay.planning.step_time import step_time

__all__ = ["advice", "described", "four_digits", "gigabytes", "large", "reason"]

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


def room_for(nbytes: int) -> str:
    """Write a memory of three digits into which so many bytes go; never less, as rounding would.

    >>> room_for(15_300_000_001), room_for(15_300_000_000), room_for(140_200_000_000)
    ('15.4 GB', '15.3 GB', '141 GB')
    """
    digit = 10 ** max(0, len(str(nbytes)) - 3)
    return gigabytes(-(-nbytes // digit) * digit)


def large(number: float) -> str:
    """Write a large number as people type it: all its digits, so that it can be read back.

    >>> large(7_500_000_000), large(120_576), large(1e12), large(123_512_345), large(1_235_500_000)
    ('7.5e9', '120576', '1e12', '123512345', '1.2355e9')
    """
    plain = str(int(number))
    digits = plain.rstrip("0")
    short = f"{digits[:1]}{'.' * (len(digits) > 1)}{digits[1:]}e{len(plain) - 1}"
    return short if len(short) < len(plain) else plain


def four_digits(number: float) -> str:
    """Write about how large a number is, to be read and not typed.

    >>> four_digits(7_500_000_000), four_digits(120_576)
    ('7.5e9', '1.206e5')
    """
    return f"{number:.4g}" if number < 1e4 else re.sub(r"\.?0*e\+0*", "e", f"{number:.3e}")  # noqa: PLR2004 - short


def described(candidate: Candidate, language: Language = "en") -> str:
    """Name a candidate: zero2 on dp=64, 2 rows at a time."""
    full, rows = candidate.recompute == "full", candidate.micro_batch
    again = ", layers computed again" if full else ""
    return say(
        language,
        f"{candidate.strategy} on {candidate.mesh}, {counted(rows, 'row')} at a time{again}",
        f"{candidate.strategy}，网格 {candidate.mesh}，每次 {rows} 条样本"
        f"{'，各层重算' if full else ''}",
    )


def reason(found: TrainingPlan, language: Language = "en") -> str:
    """Return why the best is the best, in one sentence; empty where nothing fits."""
    best = found.best
    if best is None:
        return ""
    spare = gigabytes(best.spare)
    fits = say(language, f": fits with {spare} to spare", f"：放得下，还剩 {spare}")
    said = described(best.candidate, language) + fits
    others = list(_others(found.task, best, language))[:2]
    if language == "zh":
        return f"{'；'.join([said, *others])}。"
    if others:
        others[-1] = f"and {others[-1]}"
    return f"{', '.join([said, *others])}."


def _others(task: Task, best: Planned, language: Language) -> Iterator[str]:
    """Say what the nearest other ways would cost: first those that do not fit."""
    candidate = best.candidate
    if candidate.strategy not in STRATEGIES:
        return
    at = STRATEGIES.index(candidate.strategy)
    beside = [_like(task, replace(candidate, strategy=name)) for name in STRATEGIES]
    less = list(reversed(beside[:at]))  # that divide less
    for one in [one for one in less if one.fits and _slower(one, best) > NOTICED][:1]:
        yield _longer(one.candidate.strategy, _slower(one, best), language)
    for one in [one for one in less if not one.fits][:1]:
        yield _needs(one.candidate.strategy, one, language)
    for one in beside[at + 1 :]:
        more = one.time.sent / best.time.sent - 1 if best.time.sent else 0.0
        if more > NOTICED:
            times = f"{more + 1:.3g}"
            yield say(
                language,
                f"{one.candidate.strategy} would send "
                + (f"{times} times as much" if more > 1 else f"{_percent(more)} more"),
                f"{one.candidate.strategy} 的发送量"
                + (f"是它的 {times} 倍" if more > 1 else f"要多 {_percent(more)}"),
            )
            break
    if candidate.mesh.dp < candidate.mesh.size:
        yield from _alone(task, best, language)


def _alone(task: Task, best: Planned, language: Language) -> Iterator[str]:
    """Say why other axes than dp are there."""
    if task.batch % task.gpus:
        yield say(
            language,
            f"the batch of {counted(task.batch, 'row')} does not divide by dp={task.gpus}",
            f"{task.batch} 条样本的批不能被 dp={task.gpus} 整除",
        )
        return
    mesh = MeshShape(dp=task.gpus)
    alone = _like(task, replace(best.candidate, mesh=mesh, micro_batch=1))
    if not alone.fits:
        yield _needs(f"dp={task.gpus}", alone, language)
    elif _slower(alone, best) > NOTICED:
        yield _longer(f"dp={task.gpus}", _slower(alone, best), language)


def _longer(name: str, share: float, language: Language) -> str:
    much = _percent(share)
    return say(language, f"{name} would take {much} longer", f"{name} 要慢 {much}")


def _needs(name: str, one: Planned, language: Language) -> str:
    much = gigabytes(one.bytes.total)
    return say(language, f"{name} would need {much}", f"{name} 需要 {much}")


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"


def _slower(one: Planned, best: Planned) -> float:
    return one.time.total / best.time.total - 1


def _like(task: Task, candidate: Candidate) -> Planned:
    return Planned(candidate, fullest_rank(task, candidate), step_time(task, candidate),
                   task.memory, task.batch * task.sequence)  # fmt: skip


def advice(found: TrainingPlan, wanted: PlanChoices, language: Language = "en") -> str:
    """Say what is nearest where nothing fits, and what would make it fit."""
    near, memory = found.nearest, found.task.memory
    ways, name = list(_ways(found, wanted, language)), described(near.candidate, language)
    total, over = gigabytes(near.bytes.total), gigabytes(-near.spare)
    return say(
        language,
        f"Nothing fits in {gigabytes(memory)}. The nearest is {name}, with {total}: {over} too "
        f"much. What would fit: {'; '.join(ways)}.",
        f"{gigabytes(memory)} 里什么都放不下。最接近的是 {name}，需要 {total}，超出 {over}。"
        f"可行的办法：{'；'.join(ways)}。",
    )


def _ways(found: TrainingPlan, wanted: PlanChoices, language: Language) -> Iterator[str]:
    near, task = found.nearest, found.task
    if "full" not in wanted.recompute:
        again = _tried(task, replace(wanted, recompute=("full",)))
        if again is not None:
            yield f"--recompute full, {described(again.candidate, language)}"
    if tuple(wanted.strategies) != STRATEGIES:
        other = _tried(task, replace(wanted, strategies=STRATEGIES))
        if other is not None:
            name = described(other.candidate, language)
            yield say(language, f"another strategy, {name}", f"换一种策略：{name}")
    optimizer = near.bytes.held.optimizer
    if near.bytes.total - optimizer <= task.memory:
        much, call = gigabytes(optimizer), 'rd.Zero(offload="optimizer")'
        yield say(language, f"the optimizer's {much} on the host, as {call} does",
                  f"把优化器的 {much} 放到主机内存，即 {call}")  # fmt: skip
    times = 2
    while times <= MOST_GROWTH:
        more = replace(task, gpus=task.gpus * times, batch=task.batch * times)
        if (fitting := _tried(more, wanted)) is not None:
            name = described(fitting.candidate, language)
            yield say(language, f"{more.gpus} GPUs, {name}", f"{more.gpus} 块 GPU，{name}")
            break
        times *= 2
    room = room_for(near.bytes.total)
    yield say(language, f"GPUs of {room}", f"每块有 {room} 显存的 GPU")


def _tried(task: Task, wanted: PlanChoices) -> Planned | None:
    try:
        return plan(task, wanted).best
    except RoundelayError:  # no mesh of so many, or a precision that the cluster does not have
        return None
