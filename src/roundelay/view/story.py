"""The story of a schedule: for every step a sentence, read off the frames, that explains it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundelay.collectives import Collective
from roundelay.schedule import Cell, Schedule, Transfer
from roundelay.view._amounts import ContractProgress, Payload, counted, span
from roundelay.view._graph import Shape
from roundelay.view._rank_names import RankNames
from roundelay.view.languages import Language
from roundelay.view.phases import Phase, phases_of
from roundelay.view.phrases import PROMISES, Phrases, spaced

if TYPE_CHECKING:
    from roundelay.view.picture import CellView, Frame

__all__ = ["Story", "promise_of", "story_of"]


@dataclass(frozen=True, slots=True)
class Story:
    """What is told: the plan in one line, and for every frame its place in it and a sentence."""

    plan: str  # 'reduce-scatter (3 steps), then all-gather (3 steps)'; empty for a single phase
    places: tuple[str, ...]  # by frame: 'reduce-scatter, 2 of 3', or empty
    words: tuple[str, ...]  # by frame


def story_of(
    schedule: Schedule,
    frames: Sequence[Frame],
    ranks: Sequence[str],
    shape: Shape,
    phases: Sequence[Phase] = (),
    language: Language = "en",
) -> Story:
    """Tell a schedule whose frames, names of ranks, shape and phases, if known, are given."""
    who = RankNames(ranks, shape.hosts, shape.host, language)
    phases = phases if len(phases) > 1 else phases_of(schedule, frames, shape, who)
    teller, say = _Teller(schedule, frames, who), who.say
    places, words = [""], [promise_of(schedule.collective, language)]
    for phase in phases:
        for number in range(phase.first, phase.last + 1):
            at = number - phase.first + 1
            place = say("place", name=phase.name, n=at, steps=phase.steps)
            places.append(place if phase.name and phase.steps > 1 else phase.name)
            aim = say("aim", aim=phase.aim) if phase.name and at == 1 else ""
            words.append(aim + teller.sentence(number))
    return Story(_plan(phases, say), tuple(places), tuple(words))


def _plan(phases: Sequence[Phase], say: Phrases) -> str:
    if len(phases) <= 1:
        return ""
    named = (say("phase", name=each.name, steps=say("steps", n=each.steps)) for each in phases)
    return spaced(say("then").join(named))


def promise_of(collective: Collective, language: Language = "en") -> str:
    """Say what a collective promises, in English in the words of its own file.

    >>> from roundelay.collectives.broadcast import broadcast
    >>> promise_of(broadcast)
    "Broadcast: everyone ends with the root's data."
    """
    if language != "en" and collective.name in PROMISES:
        return PROMISES[collective.name]
    module = sys.modules.get(f"roundelay.collectives.{collective.name}")
    return ((module and module.__doc__) or "").partition("\n")[0]


class _Teller:
    """Tells the steps of one schedule."""

    def __init__(self, schedule: Schedule, frames: Sequence[Frame], who: RankNames) -> None:
        self.schedule, self.frames, self.who, self.say = schedule, frames, who, who.say
        self.due: dict[int, dict[int, frozenset[int]]] = {}  # by rank, then chunk
        self.whole: dict[int, int] = {}  # by chunk: the most contributions that any rank is due
        for cell, due in schedule.due_after():
            self.due.setdefault(cell.rank, {})[cell.chunk] = due
            self.whole[cell.chunk] = max(self.whole.get(cell.chunk, 0), len(due))
        self.news = schedule.collective.idempotent
        self.adds = schedule.collective.reduces and not self.news
        sizes = {frozenset(map(len, due.values())) for due in self.due.values()}
        self.running = len(sizes) > 1 and self.adds  # a scan
        self.part = "block" if schedule.collective.named else "chunk"
        self.progress = ContractProgress(schedule, self.due, self.who, running=self.running)

    def sentence(self, number: int) -> str:
        """Say who sends what to whom in the step that leads to a frame, and what comes of it."""
        clauses = []
        for op in ("reduce", "copy"):
            mine = [transfer for transfer in self.frames[number].transfers if transfer.op == op]
            if mine:
                clauses.append(self._clause(number, mine))
        outcome, say = self._outcome(number), self.say
        told = say("clauses").join(clauses)
        if outcome:
            sentence = say("sentence with outcome", clauses=told, outcome=outcome)
        else:
            sentence = say("sentence", clauses=told)
        return sentence[0].upper() + sentence[1:]

    def _clause(self, number: int, transfers: Sequence[Transfer]) -> str:
        """Say who sends what to whom: `every rank passes the sum it has just made on to …`."""
        route = self.who.route({(transfer.src, transfer.dst) for transfer in transfers})
        say, reduces = self.say, transfers[0].op == "reduce"
        s, es = ("", "") if route.many else ("s", "es")
        if self.news:
            news = say("who has come" if reduces else "all have come")
            return say("tells", src=route.src, s=s, dst=route.dst or say("each other"), news=news)
        sent = self._sent(number, transfers)
        what = sent.words(say, many=route.many)
        if not route.dst:
            return say("exchanges and adds" if reduces else "exchanges", src=route.src, what=what)
        verb = "passes on" if sent.fresh else "sends"
        clause = say(verb, src=route.src, s=s, es=es, what=what, dst=route.dst)
        if not reduces:
            return clause
        adds = "" if route.to_many else "s"
        return say("which adds", sent=clause, adds=adds, pronoun=sent.pronoun)

    def _sent(self, number: int, transfers: Sequence[Transfer]) -> Payload:
        before = self.frames[number - 1]
        counts = set(Counter((transfer.src, transfer.dst) for transfer in transfers).values())
        views = [before.cells.get(Cell(transfer.src, transfer.chunk)) for transfer in transfers]
        found = [(view, t) for view, t in zip(views, transfers, strict=True) if view is not None]
        held = Counter(cell.rank for cell in before.cells) if not self.adds else Counter()
        return Payload(
            part=self.part,
            count=max(counts) if len(counts) == 1 else None,
            chunks=self.schedule.chunks,
            adds=self.adds,
            missing=len(found) < len(views),
            fresh=all(Cell(t.src, t.chunk) in before.changed for t in transfers),
            made=any(t.op == "reduce" and t.dst == transfers[0].src for t in before.transfers),
            own=all(set(view.ranks) == {t.src} for view, t in found),
            finished=all(len(set(view.ranks)) == self.whole.get(t.chunk) for view, t in found),
            everything=all({held[t.src]} == counts for t in transfers),
        )

    def _outcome(self, number: int) -> str:
        """Say what has been reached after a step."""
        frame = self.frames[number]
        written = [(cell, frame.cells[cell]) for cell in sorted(frame.changed)]
        summed = any(transfer.op == "reduce" for transfer in frame.transfers)
        if not written:
            return ""
        holders = self.who.holders({cell.rank for cell, _ in written})
        terms = {len(set(view.ranks)) for _, view in written}
        if self.news and summed and terms != {self.schedule.size}:
            known = span(terms, self.say)
            return self.say("knows of", who=holders, n=known, size=self.schedule.size)
        if self.adds and summed and not self.running:
            return self._terms(written)
        return self.progress.after(frame)

    def _terms(self, written: Sequence[tuple[Cell, CellView]]) -> str:
        """Say how many contributions the sums have that a step has made."""
        unfinished = [
            (cell, view)
            for cell, view in written
            if len(set(view.ranks)) != self.whole.get(cell.chunk, self.schedule.size)
        ]
        sums, say = unfinished or written, self.say
        ranks = {cell.rank for cell, _ in sums}
        holders = self.who.holders(ranks)
        count = None if len(sums) % len(ranks) else len(sums) // len(ranks)
        if not unfinished:
            whole = count == self.schedule.chunks
            held = say("whole sum") if whole else counted(count, "finished chunk", say)
            return say("holds", who=holders, what=held)
        terms = span({len(set(view.ranks)) for _, view in sums}, say)
        due = span({self.whole.get(cell.chunk, self.schedule.size) for cell, _ in sums}, say)
        if self.schedule.chunks == 1:
            return say("terms of the sum", who=holders, terms=terms, due=due)
        return say("terms", who=holders, terms=terms, due=due, of=counted(count, "chunk", say))
