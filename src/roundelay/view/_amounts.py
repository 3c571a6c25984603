"""How much is sent in a step, and how much of what is due has come, in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundelay.schedule import Cell, Schedule
from roundelay.view._rank_names import RankNames

if TYPE_CHECKING:
    from roundelay.view.picture import Frame


def span(values: Collection[int]) -> str:
    """Write what several counts have in common.

    >>> span([3, 3]), span([2, 5]), span([])
    ('3', '2 to 5', '0')
    """
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else f"{low} to {high}"


def counted(count: int | None, what: str) -> str:
    """Count things; None is a number that differs from rank to rank.

    >>> counted(1, "chunk"), counted(3, "chunk"), counted(None, "chunk")
    ('one chunk', '3 chunks', 'chunks')
    """
    return f"one {what}" if count == 1 else f"{count} {what}s" if count else f"{what}s"


@dataclass(frozen=True, slots=True)
class Payload:
    """What the messages of a step carry, as far as they are alike."""

    part: str  # chunk or block
    count: int | None  # parts per message
    chunks: int  # of the whole schedule
    adds: bool
    missing: bool  # some sender does not hold what it sends
    fresh: bool  # it came, or was made, in the step before
    made: bool  # by adding
    own: bool  # the senders' own contribution, nothing added
    finished: bool  # nothing is left to be added
    everything: bool  # all that the senders hold

    @property
    def pronoun(self) -> str:
        """Return what stands for it."""
        return "it" if self.count in (1, self.chunks) else "them"

    def words(self, *, many: bool) -> str:
        """Name it; `many` ranks send their own, one sends its own."""
        its, it_has = ("their", "they have") if many else ("its", "it has")
        number = "" if self.count in (None, 1) else f"{self.count} "
        s = "s" if many or self.count != 1 else ""
        if self.missing:
            return f"what {it_has} not got"
        if self.adds and not self.finished:
            return self._partial(its, it_has, number, s)
        if self.count == self.chunks and (self.adds or self.chunks == 1):
            return "the whole sum" if self.adds else "the data"
        if self.fresh and (self.count == 1 or self.adds):
            just = "finished" if self.made and self.adds else "received"
            return f"the {number}{self.part}{s} {it_has} just {just}"
        if self.everything and not self.adds:
            return f"{its} own {self.part}{s}" if self.count == 1 else f"all {it_has} so far"
        return counted(self.count, f"finished {self.part}" if self.adds else self.part)

    def _partial(self, its: str, it_has: str, number: str, s: str) -> str:
        if self.own and self.count == self.chunks:
            return f"{its} data"
        if self.own and not self.fresh:
            some = "one" if self.count == 1 else self.count or "some"
            return f"{some} of {its} own chunks"
        if self.fresh and self.made:
            return f"the {number}sum{s} {it_has} just made"
        return f"{its} {number}partial sum{s}"


class ContractProgress:
    """Says how much of what the contract asks for has come."""

    def __init__(
        self,
        schedule: Schedule,
        due: Mapping[int, Mapping[int, Collection[int]]],
        who: RankNames,
        *,
        running: bool,
    ) -> None:
        collective = schedule.collective
        self.due = {rank: chunks for rank, chunks in due.items() if chunks}
        self.who, self.news = who, collective.idempotent
        most = {len(chunks) for chunks in self.due.values()}
        self.most = span(most)
        adds = collective.reduces and not self.news
        part = "block" if collective.named else "chunk"
        self.parts = f"{'finished ' * adds}{part}s"
        #: What a rank that has all of its own holds, and several of them hold.
        if running:
            self.all, self.theirs = "its result", "their results"
        elif schedule.chunks == 1:
            self.all = self.theirs = "the whole sum" if adds else "the data"
        elif most == {1}:
            self.all, self.theirs = f"its {self.parts[:-1]}", f"their {self.parts}"
        elif adds:
            self.all = self.theirs = "the whole sum"
        else:
            number = "both" if self.most == "2" else f"all {self.most}"
            self.all = f"{number} {self.parts}{' meant for it' * bool(collective.named)}"
            self.theirs = self.all.replace("for it", "for them")

    def after(self, frame: Frame) -> str:
        """Say what the ranks hold after a step that has brought someone something."""
        done = {
            rank: sum(
                1 for chunk in due if (view := frame.cells.get(Cell(rank, chunk))) and view.done
            )
            for rank, due in self.due.items()
        }
        changed = {cell.rank for cell in frame.changed if cell.rank in done}
        ready = {rank for rank, due in self.due.items() if done[rank] == len(due)}
        if ready & changed:
            return self._ready(ready)
        counts = {done[rank] for rank in changed}
        if not any(counts) or self.news:
            return ""
        return f"{self.who.holders(changed)} now holds {span(counts)} of {self.most} {self.parts}"

    def _ready(self, ready: set[int]) -> str:
        few = len(ready) in (1, len(self.due))
        if self.news:
            told = f"{self.who.holders(ready)} now knows" if few else f"{len(ready)} ranks now know"
            return f"{told} that all have come"
        if few:
            return f"{self.who.holders(ready)} now holds {self.all}"
        return f"{len(ready)} of {len(self.due)} ranks now hold {self.theirs}"
