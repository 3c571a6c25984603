"""The phases of a schedule, read off its replay: a reduce-scatter, then an all-gather, say.

Nobody writes them down. What each stretch of steps does to the data names it, so an algorithm in
one file, or a schedule from JSON, has its phases for nothing, and they can't be untrue. A nested
schedule is made of phases, whose names are in `nested_phases.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from roundelay.schedule import Cell, Schedule
from roundelay.view._graph import Groups, Shape, components, scope
from roundelay.view._rank_names import RankNames

if TYPE_CHECKING:
    from roundelay.view.picture import CellView, Frame

__all__ = ["Phase", "phases_of"]

#: A schedule that changes its ways more often than this has no phases worth a name.
MOST = 6

#: What needs no look at the data: barriers pass on news, scans add up what lies below.
KNOWN = {
    ("news", "reduce"): ("report", "the news of who has come is collected"),
    ("news", "copy"): ("release", "everyone learns that all have come"),
    ("scan", "reduce"): ("scan", "every rank adds up what lies below it"),
    ("scan", "copy"): ("shift", "every rank has what the rank below it brought"),
}
SCOPES = {"": "", "inside": " inside each {host}", "between": " between {host}s"}


@dataclass(frozen=True, slots=True)
class Phase:
    """Some steps in a row that do one thing; `name` is empty where the schedule is one phase."""

    name: str
    aim: str  # what it is for, as a sentence without its capital and full stop
    first: int  # frame
    last: int

    @property
    def steps(self) -> int:
        """Count the steps."""
        return self.last - self.first + 1


def phases_of(
    schedule: Schedule, frames: Sequence[Frame], shape: Shape, who: RankNames
) -> list[Phase]:
    """Cut the steps where their kind changes, and name each stretch by what it does to the data."""
    runs = [
        part
        for first, last in _runs(frames, shape.hosts)
        for part in _without_scatter(schedule, frames, first, last)
    ]
    if len(runs) <= 1 or len(runs) > MOST:
        return [Phase("", "", 1, len(frames) - 1)] if len(frames) > 1 else []
    namer = _Namer(schedule, frames, shape, who)
    phases: list[Phase] = []
    for first, last in runs:
        name, aim = namer.name(first, last)
        if phases and phases[-1].name == name:
            phases[-1] = Phase(name, aim, phases[-1].first, last)
        else:
            phases.append(Phase(name, aim, first, last))
    return phases


def _runs(frames: Sequence[Frame], hosts: Groups) -> Iterator[tuple[int, int]]:
    """Yield the first and last frame of each stretch with one op, inside hosts or between them."""
    kinds = [
        (
            {transfer.op for transfer in frame.transfers},
            scope(frame.transfers, hosts) if hosts else "",
        )
        for frame in frames[1:]
    ]
    for _, run in groupby(range(1, len(frames)), key=lambda number: kinds[number - 1]):
        numbers = list(run)
        yield numbers[0], numbers[-1]


def _without_scatter(
    schedule: Schedule, frames: Sequence[Frame], first: int, last: int
) -> Iterator[tuple[int, int]]:
    """Cut copies in two where a root has handed everyone a different part and the rest exchange."""
    if (
        not schedule.collective.rooted
        or schedule.chunks == 1
        or frames[first].transfers[0].op != "copy"
    ):
        yield first, last
        return
    got = {schedule.root}
    for number in range(first, last + 1):
        got.update(transfer.dst for transfer in frames[number].transfers)
        if len(got) == schedule.size:
            break
    else:
        number = last
    cells = frames[number].cells
    common = any(
        all(Cell(rank, chunk) in cells for rank in got) for chunk in range(schedule.chunks)
    )
    from_root = {cell.rank for cell in frames[first - 1].cells} == {schedule.root}
    if common or number == last or not from_root:
        yield first, last
        return
    yield first, number
    yield number + 1, last


class _Namer:
    """Names stretches of one schedule."""

    def __init__(
        self, schedule: Schedule, frames: Sequence[Frame], shape: Shape, who: RankNames
    ) -> None:
        self.schedule, self.frames, self.who = schedule, frames, who
        self.whole = max((len(due) for _, due in schedule.due_after()), default=0)
        self.hosts, self.host, self.trees = shape.hosts, shape.host, len(shape.trees)

    def name(self, first: int, last: int) -> tuple[str, str]:
        """Return name and aim of the steps that lead to frames `first` to `last`."""
        moved = [t for frame in self.frames[first : last + 1] for t in frame.transfers]
        ops = {transfer.op for transfer in moved}
        if len(ops) > 1:
            return "overlap", "some is still added up while other data is already passed on"
        collective = self.schedule.collective
        kind = "news" if collective.idempotent else collective.name.removeprefix("ex")
        known = KNOWN.get((kind, ops.pop()))
        where = scope(moved, self.hosts) if self.hosts else ""
        if known is not None:
            name, aim = known
        elif moved[0].op == "reduce":
            name, aim = self._reducing(first, last, where)
        else:
            name, aim = self._copying(first, last, where)
        return name + SCOPES[where].format(host=self.host), aim

    def _reducing(self, first: int, last: int, where: str) -> tuple[str, str]:
        if self.trees > 1:
            return "reduce up both trees", "each root gets the whole sum of its part"
        groups = self._groups(first, last, where)
        whole = min(map(len, groups)) if where == "inside" else self.whole
        held = [self._summed(last, group, whole) for group in groups]
        if not all(held):
            return "reduce", "contributions are added up"
        of = f"its {self.host}'s sum" if where == "inside" else "the whole sum"
        ranks = {rank for chunks in held for holders in chunks for rank in holders}
        who = self.who.holders(ranks)
        if all(len(holders) > 1 for chunks in held for holders in chunks):
            return "all-reduce", f"{who} gets {of}"
        if all(len({rank for holders in chunks for rank in holders}) == 1 for chunks in held):
            return "reduce", f"{who} gets {of}"
        return "reduce-scatter", f"{who} gets one part of {of}"

    def _copying(self, first: int, last: int, where: str) -> tuple[str, str]:
        groups = self._groups(first, last, where)
        senders = {transfer.src for transfer in self.frames[first].transfers}
        takers = {t.dst for frame in self.frames[first : last + 1] for t in frame.transfers}
        data = "sum" if self.schedule.collective.reduces else "data"
        one_source = all(len(senders.intersection(group)) <= 1 for group in groups)
        one_source = one_source or self.trees > 1 or self.schedule.chunks == 1
        if self._alike(first, last, groups):
            name = "broadcast" if one_source else "all-gather"
            if where == "between":
                return name, f"every {self.host} holds the whole {data}, in parts"
            return f"{name}{' down both trees' * (self.trees > 1)}", f"every rank gets the {data}"
        if one_source and len(takers) > 1:
            return "scatter", "every rank gets a different part"
        if self.schedule.collective.rooted:
            return "gather", f"{self.who.holders({self.schedule.root})} collects the parts"
        return "copy", f"{self.who.holders(takers)} gets what others hold"

    def _groups(self, first: int, last: int, where: str) -> list[list[int]]:
        """Return who works together in these steps."""
        if where == "inside":
            return [list(ranks) for ranks in self.hosts]
        if where == "between":
            steps = self.frames[first : last + 1]
            return components((t for frame in steps for t in frame.transfers), self.schedule.size)
        return [list(range(self.schedule.size))]

    def _summed(self, number: int, group: list[int], whole: int) -> list[list[int]]:
        """Return by chunk, of those the group summed up, the ranks that have the whole sum."""
        held: dict[int, dict[int, frozenset[int]]] = {}  # by chunk, then rank
        members = set(group)
        for cell, view in self.frames[number].cells.items():
            if cell.rank in members:
                held.setdefault(cell.chunk, {})[cell.rank] = frozenset(view.ranks)
        holders = [
            [rank for rank, ranks in cells.items() if len(ranks) >= whole]
            for cells in held.values()
        ]
        return [ranks for ranks in holders if ranks]

    def _alike(self, first: int, last: int, groups: list[list[int]]) -> bool:
        """Tell whether the ranks of each group end with the same of all that they have moved."""
        cells = self.frames[last].cells
        home = {rank: index for index, group in enumerate(groups) for rank in group}
        moved: list[set[int]] = [set() for _ in groups]
        for frame in self.frames[first : last + 1]:
            for transfer in frame.transfers:
                moved[home[transfer.dst]].add(transfer.chunk)
        return all(
            _equal([cells.get(Cell(rank, chunk)) for rank in group])
            for group, chunks in zip(groups, moved, strict=True)
            for chunk in chunks
        )


def _equal(views: list[CellView | None]) -> bool:
    return len({frozenset(view.ranks) if view else None for view in views}) == 1
