"""How much is sent in a step, and how much of what is due has come, in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundelay.schedule import Cell, Schedule
from roundelay.view._rank_names import RankNames
from roundelay.view.phrases import Phrases

if TYPE_CHECKING:
    from roundelay.view.picture import Frame


def span(values: Collection[int], say: Phrases) -> str:
    """Write what several counts have in common.

    >>> [span(counts, Phrases()) for counts in ([3, 3], [2, 5], [])]
    ['3', '2 to 5', '0']
    """
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else say("to", low=low, high=high)


def counted(count: int | None, what: str, say: Phrases) -> str:
    """Count things; None is a number that differs from rank to rank.

    >>> [counted(count, "chunk", Phrases()) for count in (1, 3, None)]
    ['one chunk', '3 chunks', 'chunks']
    """
    name = say(what)
    if count == 1:
        return say("one of", what=name)
    return say("several of", n=count, what=name) if count else say("some of", what=name)


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

    def words(self, say: Phrases, *, many: bool) -> str:
        """Name it; `many` ranks send their own, one sends its own."""
        its, it_has = ("their", "they have") if many else ("its", "it has")
        gaps = {
            "its": its,
            "it_has": it_has,
            "number": "" if self.count in (None, 1) else say("number", n=self.count),
            "s": "s" if many or self.count != 1 else "",
            "part": say(self.part),
            "n": self.count,
        }
        part = f"finished {self.part}" if self.adds else self.part
        key = self._key()
        return say(key, **gaps) if key else counted(self.count, part, say)

    def _key(self) -> str:
        """Return the phrase that names it; none where it is only counted."""
        if self.missing:
            return "not got"
        if self.adds and not self.finished:
            return self._partial()
        if self.count == self.chunks and (self.adds or self.chunks == 1):
            return "whole sum" if self.adds else "the data"
        if self.fresh and (self.count == 1 or self.adds):
            return "just finished" if self.made and self.adds else "just received"
        if self.everything and not self.adds:
            return "own part" if self.count == 1 else "all so far"
        return ""

    def _partial(self) -> str:
        if self.own and self.count == self.chunks:
            return "own data"
        if self.own and not self.fresh:
            return "one own" if self.count == 1 else "several own" if self.count else "some own"
        return "sum just made" if self.fresh and self.made else "partial sum"


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
        collective, say = schedule.collective, who.say
        self.due = {rank: chunks for rank, chunks in due.items() if chunks}
        self.who, self.news, self.say = who, collective.idempotent, say
        most = {len(chunks) for chunks in self.due.values()}
        self.most = span(most, say)
        adds = collective.reduces and not self.news
        self.part = say(("finished " if adds else "") + ("block" if collective.named else "chunk"))
        #: What a rank that has all of its own holds, and several of them hold.
        if running:
            self.all, self.theirs = say("its result"), say("their results")
        elif schedule.chunks == 1:
            self.all = self.theirs = say("whole sum" if adds else "the data")
        elif most == {1}:
            self.all, self.theirs = (
                say(key, part=self.part) for key in ("its part", "their parts")
            )
        elif adds:
            self.all = self.theirs = say("whole sum")
        else:
            number = "both parts" if self.most == "2" else "all parts"
            ends = (" for it", " for them") if collective.named else ("", "")
            self.all, self.theirs = (say(number + end, n=self.most, part=self.part) for end in ends)

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
        who, number = self.who.holders(changed), span(counts, self.say)
        return self.say("holds some", who=who, n=number, most=self.most, parts=self.part)

    def _ready(self, ready: set[int]) -> str:
        few, say = len(ready) in (1, len(self.due)), self.say
        who = self.who.holders(ready)
        if self.news:
            return say("knows all", who=who) if few else say("so many know all", n=len(ready))
        if few:
            return say("holds", who=who, what=self.all)
        return say("so many hold", n=len(ready), size=len(self.due), what=self.theirs)
