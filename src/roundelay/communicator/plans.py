"""The programs of one communicator: compiled when first needed, kept for the next call."""

from __future__ import annotations

from typing import Any

from roundelay import _core
from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.communicator.buffers import CODES, view
from roundelay.communicator.jobs import OPS, Job
from roundelay.engines._plans import native_plan
from roundelay.errors import UnknownNameError
from roundelay.schedule import Reach, compile_schedule
from roundelay.tuning import Tuning

__all__ = ["Plans"]

COLLECTIVES = {name: number for number, name in enumerate(collectives.names())}
ALGORITHMS = {name: number for number, name in enumerate(algorithms.names())}
ALGORITHM_OF = {algorithm.name: algorithm.collective.name for algorithm in algorithms}
PRIVATE = Reach()
IN_PLACE = Reach(input=True, output=True, in_place=True)
#: From here on, ranks first look whether all buffers lie in the arena.
AGREE_FROM = 32 * 1024

Rung = tuple[int, _core.Plan, _core.Plan | None, int]


class Plans:
    """Chooses the algorithm of a job and gives the native core what it needs to run it."""

    def __init__(self, rank: int, size: int, tuning: Tuning) -> None:
        self.rank, self.size, self.tuning = rank, size, tuning
        self._known: dict[tuple[str, int, bool], _core.Plan] = {}

    def arguments(self, job: Job, algorithm: str | None) -> tuple[Any, ...]:
        """Return the arguments of the native call, in its order."""
        if algorithm is None:
            name = self.tuning.choose(job.collective, job.nbytes)
        else:
            name = _forced(job.collective, algorithm)
        reaching = None
        if job.collective == "all_reduce" and job.nbytes >= AGREE_FROM and self.size > 1:
            reaching = self.plan(name, job.root, in_arena=True)
        return (
            self.plan(name, job.root),
            reaching,
            None if job.input is None else view(job.input),
            None if job.output is None else view(job.output),
            COLLECTIVES[job.collective],
            ALGORITHMS[name],
            job.root,
            CODES[job.dtype],
            OPS[job.op],
            job.item,
            job.count,
            list(job.counts),
        )

    def plan(self, name: str, root: int, *, in_arena: bool = False) -> _core.Plan:
        """Return the program of an algorithm, compiled once."""
        key = (name, root, in_arena)
        found = self._known.get(key)
        if found is None:
            schedule = algorithms.load(name).schedule(self.size, root)
            programs = compile_schedule(schedule, IN_PLACE if in_arena else PRIVATE)
            found = self._known[key] = native_plan(programs, self.rank)
        return found

    def all_reduce_ladder(self) -> tuple[list[Rung], int]:
        """Return the programs of plain all-reduces by size, so that these need no Python."""
        ladder: list[Rung] = []
        for choice in self.tuning.table["all_reduce"]:
            plan = self.plan(choice.algorithm, 0)
            most = int(min(choice.up_to, 1 << 62))
            number = ALGORITHMS[choice.algorithm]
            if most >= AGREE_FROM and self.size > 1:
                ladder.append((AGREE_FROM - 1, plan, None, number))
                ladder.append((most, plan, self.plan(choice.algorithm, 0, in_arena=True), number))
            else:
                ladder.append((most, plan, None, number))
        return ladder, COLLECTIVES["all_reduce"]


def _forced(collective: str, algorithm: str) -> str:
    """Return the full name of an algorithm that the caller asked for."""
    prefix = f"{collective}_"
    name = prefix + algorithm.removeprefix(prefix)
    if ALGORITHM_OF.get(name) != collective:
        same = [other for other, of in ALGORITHM_OF.items() if of == collective]
        known = [other.removeprefix(prefix) for other in same]
        raise UnknownNameError(f"algorithms of {collective}", algorithm, known)
    return name
