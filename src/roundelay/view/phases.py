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
    ("news", "reduce"): "report",
    ("news", "copy"): "release",
    ("scan", "reduce"): "scan",
    ("scan", "copy"): "shift",
}


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
        self.schedule, self.frames, self.who, self.say = schedule, frames, who, who.say
        self.whole = max((len(due) for _, due in schedule.due_after()), default=0)
        self.hosts, self.host, self.trees = shape.hosts, who.host, len(shape.trees)

    def name(self, first: int, last: int) -> tuple[str, str]:
        """Return name and aim of the steps that lead to frames `first` to `last`."""
        moved = [t for frame in self.frames[first : last + 1] for t in frame.transfers]
        ops = {transfer.op for transfer in moved}
        if len(ops) > 1:
            return self._both("overlap")
        collective = self.schedule.collective
        kind = "news" if collective.idempotent else collective.name.removeprefix("ex")
        known = KNOWN.get((kind, ops.pop()))
        where = scope(moved, self.hosts) if self.hosts else ""
        if known is not None:
            name, aim = self._both(known)
        elif moved[0].op == "reduce":
            name, aim = self._reducing(first, last, where)
        else:
            name, aim = self._copying(first, last, where)
        return self.say(where, name=name, host=self.host) if where else name, aim

    def _both(self, key: str) -> tuple[str, str]:
        """Return the name and the aim of a phase whose aim is always the same."""
        return self.say(key), self.say(f"{key} aim")

    def _reducing(self, first: int, last: int, where: str) -> tuple[str, str]:
        say = self.say
        if self.trees > 1:
            return self._both("both trees up")
        groups = self._groups(first, last, where)
        whole = min(map(len, groups)) if where == "inside" else self.whole
        held = [self._summed(last, group, whole) for group in groups]
        if not all(held):
            return self._both("reduce")
        of = say("host's sum", host=self.host) if where == "inside" else say("whole sum")
        ranks = {rank for chunks in held for holders in chunks for rank in holders}
        who = self.who.holders(ranks)
        if all(len(holders) > 1 for chunks in held for holders in chunks):
            return say("all-reduce"), say("gets", who=who, what=of)
        if all(len({rank for holders in chunks for rank in holders}) == 1 for chunks in held):
            return say("reduce"), say("gets", who=who, what=of)
        return say("reduce-scatter"), say("gets one part", who=who, what=of)

    def _copying(self, first: int, last: int, where: str) -> tuple[str, str]:
        say = self.say
        groups = self._groups(first, last, where)
        senders = {transfer.src for transfer in self.frames[first].transfers}
        takers = {t.dst for frame in self.frames[first : last + 1] for t in frame.transfers}
        data = say("sum" if self.schedule.collective.reduces else "data")
        one_source = all(len(senders.intersection(group)) <= 1 for group in groups)
        one_source = one_source or self.trees > 1 or self.schedule.chunks == 1
        if self._alike(first, last, groups):
            name = say("broadcast" if one_source else "all-gather")
            if where == "between":
                return name, say("host holds", host=self.host, data=data)
            if self.trees > 1:
                name = say("both trees down", name=name)
            return name, say("everyone gets", data=data)
        if one_source and len(takers) > 1:
            return self._both("scatter")
        if self.schedule.collective.rooted:
            root = self.who.holders({self.schedule.root})
            return say("gather"), say("collects", who=root)
        return say("copy"), say("gets others'", who=self.who.holders(takers))

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
