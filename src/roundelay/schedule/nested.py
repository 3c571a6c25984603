"""Schedules over hosts, as data: phases, each an ordinary collective inside hosts or between them.

Nobody says how a phase is carried out. To be proved, priced and drawn it is expanded by any
algorithm of its collective; an engine hands it to whatever joins those ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from roundelay.collectives import Collective
from roundelay.schedule.compose import sequence
from roundelay.schedule.schedule import Schedule, Transfer

__all__ = ["Axis", "NestedCall", "NestedPhase", "NestedSchedule", "RankPhase"]

#: The ranks of one host; those with one place on their hosts; all.
Axis = Literal["inside", "lane", "everyone"]


@dataclass(frozen=True, slots=True)
class NestedCall:
    """One ordinary collective among some ranks: block b of its contract is the chunks `blocks[b]`.

    Chunks are those of the whole; a block may have none. `root` is a place among `ranks`.
    """

    collective: Collective
    ranks: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    root: int = 0

    def before(self, place: int) -> tuple[int, ...] | None:
        """Return the chunks that a rank brings, in the order of its input; None without input."""
        return self._chunks(self.collective.before(len(self.ranks), self.root, place))

    def after(self, place: int) -> tuple[int, ...] | None:
        """Return the chunks that a rank gets, in the order of its output; None without output."""
        return self._chunks(sorted(self.collective.after(len(self.ranks), self.root, place)))

    def _chunks(self, blocks: Iterable[int]) -> tuple[int, ...] | None:
        found = [self.blocks[block] for block in blocks]
        return tuple(chain.from_iterable(found)) if found else None


@dataclass(frozen=True, slots=True)
class NestedPhase:
    """Calls side by side, of ranks that have nothing in common."""

    axis: Axis
    calls: tuple[NestedCall, ...]

    def call_of(self, rank: int) -> NestedCall | None:
        """Return the call that a rank makes, if it makes one."""
        return next((call for call in self.calls if rank in call.ranks), None)


@dataclass(frozen=True, slots=True)
class RankPhase:
    """One rank's part in a phase: its call, if it makes one, and the chunks of its buffers."""

    axis: Axis
    call: NestedCall | None = None
    brings: tuple[int, ...] | None = None
    gets: tuple[int, ...] | None = None
    most: int = 0  # blocks of the largest buffer of any rank
    completes: bool = False  # all that is added up


#: The schedule of one call of a phase, by whatever algorithm.
Inner = Callable[[Axis, NestedCall], Schedule]


@dataclass(frozen=True, slots=True)
class NestedSchedule:
    """A collective over hosts, phase by phase. Every block of the contract is cut into `parts`."""

    collective: Collective
    hosts: tuple[tuple[int, ...], ...]
    phases: tuple[NestedPhase, ...]
    root: int = 0
    parts: int = 1

    @property
    def name(self) -> str:
        """What its schedule is called."""
        return f"{self.collective.name}_hierarchical"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.hosts))

    def of_rank(self, rank: int) -> list[RankPhase]:
        """Return a rank's part in every phase, for an engine to walk."""
        adding = [any(call.collective.reduces for call in phase.calls) for phase in self.phases]
        found = []
        for number, phase in enumerate(self.phases):
            call = phase.call_of(rank)
            if call is None:
                found.append(RankPhase(phase.axis))
                continue
            place = call.ranks.index(rank)
            found.append(
                RankPhase(
                    phase.axis,
                    call,
                    call.before(place),
                    call.after(place),
                    call.collective.per_rank(len(call.ranks), call.root),
                    adding[number] and not any(adding[number + 1 :]),
                )
            )
        return found

    def expand(self, inner: Inner) -> Schedule:
        """Return one flat schedule for all ranks, with `inner` for every call of every phase."""
        fine, phases = self._expanded(inner)
        return Schedule(
            self.collective,
            self.size,
            sequence(*phases),
            root=self.root,
            parts=self.parts * fine,
            name=self.name,
        )

    def steps(self, inner: Inner) -> list[int]:
        """Return how many steps each phase takes in the flat schedule."""
        return [max(each.step for each in phase) + 1 for phase in self._expanded(inner)[1]]

    def _expanded(self, inner: Inner) -> tuple[int, list[list[Transfer]]]:
        """Return the parts that each chunk is cut into once more, and the phases' transfers."""
        found = [[(call, inner(phase.axis, call)) for call in phase.calls] for phase in self.phases]
        fine = math.lcm(*(schedule.parts for phase in found for _, schedule in phase))
        return fine, [
            _dense(chain.from_iterable(_placed(call, schedule, fine) for call, schedule in phase))
            for phase in found
        ]


def _placed(call: NestedCall, inner: Schedule, fine: int) -> Iterator[Transfer]:
    """Give a call's transfers the ranks and chunks of the whole, each chunk cut into `fine`."""
    width = fine // inner.parts
    for step, src, dst, chunk, op in inner.transfers:
        block, part = divmod(chunk, inner.parts)
        for whole in call.blocks[block]:
            first = whole * fine + part * width
            for each in range(first, first + width):
                yield Transfer(step, call.ranks[src], call.ranks[dst], each, op)


def _dense(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Leave out the steps in which only blocks without chunks would travel."""
    found = list(transfers)
    number = {step: index for index, step in enumerate(sorted({each.step for each in found}))}
    return [each._replace(step=number[each.step]) for each in found]
