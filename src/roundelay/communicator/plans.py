"""The programs of one communicator: compiled when first needed, kept for the next call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from roundelay import _core
from roundelay.algorithms import algorithms
from roundelay.arguments import shown
from roundelay.collectives import collectives
from roundelay.communicator.buffers import CODES, view
from roundelay.engines._end import Job, ScheduleFor
from roundelay.engines._plans import native_plan
from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.reductions import REDUCTIONS
from roundelay.schedule import Programs, Reach, Schedule, compile_schedule
from roundelay.tuning import DEFAULT, Tuning, rounds_once

__all__ = ["COLLECTIVES", "OPS", "Plans", "schedule_for"]

COLLECTIVES = {name: number for number, name in enumerate(collectives.names())}
ALGORITHMS = {name: number for number, name in enumerate(algorithms.names())}
ALGORITHM_OF = {algorithm.name: algorithm.collective.name for algorithm in algorithms}
OPS = {name: code for code, name in enumerate(REDUCTIONS)}
HALVES = ("float16", "bfloat16")
PRIVATE = Reach()
#: What is reached into where these buffers of all ranks lie in the arena. Not those of scans: a
#: result in place of its input would overwrite what later ranks still read.
IN_ARENA = {
    "all_reduce": Reach(input=True, output=True, in_place=True),
    "reduce_scatter": Reach(input=True),
    "reduce": Reach(input=True),
    "all_gather": Reach(input=True),
    "gather": Reach(input=True),
    "broadcast": Reach(input=True),
    "scatter": Reach(input=True),
    "all_to_all": Reach(input=True),
}
#: From here on, ranks first look whether all buffers lie in the arena.
AGREE_FROM = 32 * 1024
EVER = 1 << 62
#: Beyond every cache the memory itself is slow. Where one rank would move all of it alone, on up to
#: so many ranks, slots are quicker: both ends work then.
ALONE = {"gather": EVER, "reduce": 2, "broadcast": 2}
ALONE_UP_TO = 4 * 1024 * 1024

Rung = tuple[int, _core.Plan, _core.Plan | None, int, bool]


class Plans:
    """Chooses the algorithm of a job and gives the native core what it needs to run it."""

    def __init__(self, rank: int, size: int, tuning: Tuning) -> None:
        self.rank, self.size, self.tuning = rank, size, tuning
        self._known: dict[tuple[str, int, Reach], _core.Plan] = {}

    def arguments(self, job: Job, algorithm: str | None) -> tuple[Any, ...]:
        """Return the arguments of the native call, in its order."""
        name = chosen(self.tuning, job, algorithm, self.size)
        reaches = AGREE_FROM <= job.nbytes <= self._reach_up_to(job.collective)
        return (
            self.plan(name, job.root),
            self.reaching(job.collective, name, job.root) if reaches else None,
            None if job.input is None else view(job.input),
            None if job.output is None else view(job.output),
            COLLECTIVES[job.collective],
            ALGORITHMS[name],
            job.label or job.root,  # only calls without a root have labels
            CODES[job.dtype],
            OPS[job.op],
            job.item,
            job.count,
            list(job.counts),
        )

    def plan(self, name: str, root: int, reach: Reach = PRIVATE) -> _core.Plan:
        """Return the program of an algorithm, compiled once."""
        key = (name, root, reach)
        found = self._known.get(key)
        if found is None:
            programs = compiled(name, self.size, root, reach)
            found = self._known[key] = native_plan(programs, self.rank)
        return found

    def reaching(self, collective: str, name: str, root: int) -> _core.Plan | None:
        """Return the program for buffers in the arena, where there is one."""
        reach = IN_ARENA.get(collective)
        return self.plan(name, root, reach) if reach is not None and self.size > 1 else None

    def ladder(self, collective: str, root: int) -> list[Rung]:
        """Return the programs of plain calls by size, so that these need no Python."""
        found: list[Rung] = []
        for choice in self.tuning.table[collective]:
            once = rounds_once(choice.algorithm, self.size)
            plan = self.plan(choice.algorithm, root)
            most, limit = int(min(choice.up_to, EVER)), self._reach_up_to(collective)
            number = ALGORITHMS[choice.algorithm]
            found.append((min(most, AGREE_FROM - 1), plan, None, number, once))
            if most >= AGREE_FROM:
                reaching = self.reaching(collective, choice.algorithm, root)
                found.append((min(most, limit), plan, reaching, number, once))
            if most > limit:
                found.append((most, plan, None, number, once))
        return found

    def _reach_up_to(self, collective: str) -> int:
        """Return the bytes up to which buffers in the arena are reached into."""
        return ALONE_UP_TO if self.size <= ALONE.get(collective, 0) else EVER


@lru_cache(maxsize=128)
def compiled(name: str, size: int, root: int, reach: Reach) -> Programs:
    """Return every rank's program; kept for ranks that are threads, for groups, and for forks."""
    return compile_schedule(algorithms.load(name).schedule(size, root), reach)


def chosen(tuning: Tuning, job: Job, algorithm: str | None, size: int) -> str:
    """Return the full name of the algorithm for a job: the one asked for, or the best."""
    if algorithm is not None:
        return _forced(job.collective, algorithm)
    name = tuning.choose(job.collective, job.nbytes)
    if (job.dtype in HALVES or job.op == "avg") and not rounds_once(name, size):
        return DEFAULT.choose(job.collective, job.nbytes)
    return name


def schedule_for(size: int, tuning: Tuning) -> ScheduleFor:
    """Return what finds the schedule of a job, for engines that walk schedules themselves."""
    known: dict[tuple[str, int], Schedule] = {}

    def find(job: Job, algorithm: str | None) -> Schedule:
        key = chosen(tuning, job, algorithm, size), job.root
        if key not in known:
            known[key] = algorithms.load(key[0]).schedule(size, job.root)
        return known[key]

    return find


def _forced(collective: str, algorithm: str) -> str:
    """Return the full name of an algorithm that the caller asked for."""
    prefix = f"{collective}_"
    if not isinstance(algorithm, str):
        raise InvalidArgumentError(
            f"{collective}: algorithm is a name, such as those of `roundelay list {collective}`, "
            f"not {shown(algorithm)}."
        )
    name = prefix + algorithm.removeprefix(prefix)
    if ALGORITHM_OF.get(name) != collective:
        same = [other for other, of in ALGORITHM_OF.items() if of == collective]
        known = [other.removeprefix(prefix) for other in same]
        raise UnknownNameError(f"algorithms of {collective}", algorithm, known)
    return name
