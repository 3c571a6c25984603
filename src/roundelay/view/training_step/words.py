"""Tells the moments of a training step: a title and a sentence or two, in either language."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from roundelay.planning import gigabytes
from roundelay.planning.clock import staleness_bound
from roundelay.planning.held import whole_everywhere
from roundelay.view.languages import LANGUAGES, Language
from roundelay.view.training_step.choices import SLOWNESS
from roundelay.view.training_step.frames import StepFrame, TrainingStep
from roundelay.view.training_step.lanes import LaneSpan, Movement
from roundelay.view.training_step.phrases import NAMES, PHRASES

__all__ = ["StepTeller", "strategy_names"]

KINDS = ("forward", "backward", "step")


class StepTeller:
    """Tells one step in one language."""

    def __init__(self, step: TrainingStep, language: Language = "en") -> None:
        self.step, self.choices = step, step.choices
        self._at = LANGUAGES.index(language)

    def say(self, key: str, **fill: object) -> str:
        """Return a phrase; a place named `What` begins with a capital."""
        found = PHRASES[key][self._at]
        large = {name.capitalize(): str(value)[:1].upper() + str(value)[1:]
                 for name, value in fill.items()}  # fmt: skip
        return found.format(**fill, **large)

    @property
    def name(self) -> str:
        """What the strategy is called."""
        return NAMES[self.choices.strategy][self._at]

    def title(self, number: int) -> str:
        """Return the title of a moment."""
        frame = self.step.frames[number]
        if number == 0:
            return self.say("title start")
        if frame.until <= frame.at:
            alone = self.choices.strategy in ("ps-async", "ps-ssp")
            return self.say("title end alone" if alone else "title end")
        parts = [self._doing(kind, frame) for kind in KINDS if _ranks(frame, kind)]
        parts += [self._travels(one) for one in _carried(frame)[:2]]
        if any(span.lane == "server" and span.kind == "step" for span in frame.spans):
            parts.append(self.say("title update"))
        found = " · ".join(dict.fromkeys(parts)) or self.say("title wait")
        return found[:1].upper() + found[1:] if self._at == 0 else found

    def words(self, number: int) -> str:
        """Return what happens at a moment, and why."""
        frame = self.step.frames[number]
        if number == 0:
            told = self._start()
        elif frame.until <= frame.at:
            told = [self._end()]
        else:
            computing = [kind for kind in KINDS if _ranks(frame, kind)]
            told = [self._computes(kind, frame) for kind in computing]
            told += [self._moves(one, frame) for one in _carried(frame)]
            told += self._updates(frame)
            told += self._waits(frame, alone=not computing)
        glue = " " if self._at == 0 else ""
        return glue.join(dict.fromkeys(told))

    # ---- names

    def units(self, units: Iterable[int]) -> str:
        """Name layers."""
        listed = sorted(set(units))
        if len(listed) == 1:
            return self.say("layer", number=listed[0] + 1)
        return self.say("layers", first=listed[0] + 1, last=listed[-1] + 1)

    def who(self, ranks: Iterable[int]) -> str:
        """Name ranks."""
        listed = sorted(set(ranks))
        if len(listed) == 1:
            return self.say("rank", rank=listed[0])
        return self.say("ranks", ranks=(", " if self._at == 0 else "、").join(map(str, listed)))

    def what(self, movement: Movement) -> str:
        """Name what travels: a bucket, or a layer."""
        units = self.units(movement.units)
        if self.choices.strategy == "zero3":
            return units
        return self.say("bucket", number=movement.number + 1, units=units)

    # ---- titles

    def _doing(self, kind: str, frame: StepFrame) -> str:
        if kind == "step":
            return self.say("title step shard" if self._sharded else "title step")
        units = {unit for span in _computing(frame, kind) for unit in span.units}
        if len(units) == self.choices.layers > 1:
            return self.say(f"title {kind}")
        return self.say(f"title {kind} of", units=self.units(units))

    def _travels(self, one: Movement) -> str:
        if one.kind in ("push", "pull"):
            return self.say(f"title {one.kind}", who=self.who([_worker(one)]))
        return self.say(f"title {one.kind}", what=self.what(one))

    @property
    def _sharded(self) -> bool:
        return self.choices.divided and self.choices.ranks > 1

    # ---- sentences

    def _start(self) -> list[str]:
        choices, first = self.choices, self.step.frames[0]
        held = gigabytes(first.held[0].total)
        told = [
            self.say(f"start {choices.strategy}", held=held, ranks=choices.ranks,
                     staleness=choices.staleness),
            self.say("start mixed" if choices.precision == "bf16" else "start plain"),
        ]  # fmt: skip
        if choices.straggler is not None:
            told.append(self.say("start straggler", rank=choices.straggler, times=SLOWNESS))
        return told

    def _end(self) -> str:
        step, choices, last = self.step, self.choices, self.step.frames[-1]
        if choices.ranks == 1:
            return self.say("end alone")
        fill = {"sent": gigabytes(last.sent[-1]), "held": gigabytes(last.held[0].total),
                "server": gigabytes(last.sent[0])}  # fmt: skip
        if choices.strategy in ("ps-async", "ps-ssp"):
            pushed = [one for one in step.movements if one.kind == "push"]
            bound = staleness_bound(choices.ranks, choices.staleness)
            most = self._missed(max(one.stale for one in pushed))
            key = f"end {choices.strategy}"
            return self.say(key, updates=len(pushed), most=most, bound=bound)
        numel = choices.layers * step.sizes.unit
        whole = gigabytes(whole_everywhere(numel, step.sizes.width).total)
        key = "end zero1" if choices.strategy == "zero2" else f"end {choices.strategy}"
        return self.say(key, **fill, whole=whole)

    def _missed(self, count: int) -> str:
        if self._at:
            return str(count)
        return self.say("one update") if count == 1 else self.say("updates", count=count)

    def _computes(self, kind: str, frame: StepFrame) -> str:
        choices, spans = self.choices, _computing(frame, kind)
        units = self.units(unit for span in spans for unit in span.units)
        if len(spans) < choices.ranks:
            return self.say(f"some {kind}", who=self.who(_ranks(frame, kind)), units=units)
        if kind == "step":
            told = self.say("step shard" if self._sharded else "step", ranks=choices.ranks)
            if choices.precision == "bf16":
                told += (" " if self._at == 0 else "") + self.say("step mixed")
            return told
        own = f"{kind} zero3" if choices.strategy == "zero3" and choices.ranks > 1 else kind
        return self.say(own, units=units)

    def _moves(self, one: Movement, frame: StepFrame) -> str:
        sent = gigabytes(sum(nbytes for src, _, nbytes in one.pairs if src == one.pairs[0][0]))
        if one.kind in ("push", "pull"):
            who = self.who([_worker(one)])
            if one.kind == "pull":
                return self.say(f"pull {one.part}", who=who, version=one.number, sent=sent)
            if one.stale:
                now = one.number - 1
                return self.say("push stale", who=who, version=now - one.stale, now=now, sent=sent,
                                count=self._missed(one.stale))  # fmt: skip
            return self.say("push", who=who, sent=sent)
        key = one.kind
        if one.kind == "reduce_scatter":
            key += " keep" if self.choices.strategy == "zero1" else " free"
        elif one.kind == "all_gather":
            busy = any(_ranks(frame, kind) for kind in KINDS)
            ahead = " ahead" if busy else " before"
            key += ahead if self.choices.strategy == "zero3" else " after"
        return self.say(key, what=self.what(one), sent=sent)

    def _updates(self, frame: StepFrame) -> list[str]:
        if any(span.lane == "server" and span.kind == "step" for span in frame.spans):
            return [self.say("update", version=frame.versions[-1] + 1)]
        return []

    def _waits(self, frame: StepFrame, *, alone: bool) -> list[str]:
        """Say who waits for whom; ranks that wait for the network alone are worth it if all do."""
        whom: dict[int, set[int]] = {}
        idle = [span for span in frame.spans if span.kind == "wait" and span.lane == "compute"]
        for span in idle:
            whom.setdefault(span.waits_for, set()).add(span.rank)
        if self.choices.strategy in ("ps-async", "ps-ssp"):
            return self._held_up(idle, frame)
        waiting = {other: ranks for other, ranks in whom.items() if other >= 0}
        if any(one.kind not in ("push", "pull") for one in frame.movements):
            waiting = {}  # a collective that is under way waits for nobody any more
        told = [self.say("wait rank" if len(ranks) == 1 else "wait ranks", who=self.who(ranks),
                         whom=self.who([other])) for other, ranks in waiting.items()]  # fmt: skip
        if not told and alone and not self.choices.served:
            told.append(self.say("wait network"))
        if self.choices.served and -1 in whom:
            told.append(self._server(whom[-1]))
        return told

    def _server(self, ranks: set[int]) -> str:
        return self.say("wait server" if len(ranks) == 1 else "wait servers", who=self.who(ranks))

    def _held_up(self, waiting: list[LaneSpan], frame: StepFrame) -> list[str]:
        """Tell of workers whose gradient was applied, and which the bound holds up."""
        done = _pushed(self.step.movements, frame.at, self.choices.ranks)
        slowest = min(range(len(done)), key=lambda rank: done[rank])
        ahead = {span.rank: done[span.rank] - done[slowest] for span in waiting}
        held_up = [rank for rank, count in ahead.items() if count > self.choices.staleness]
        if self.choices.strategy != "ps-ssp" or not held_up:
            return []
        count = max(ahead[rank] for rank in held_up)
        return [self.say("wait bound", who=self.who(held_up), count=count,
                         whom=self.who([slowest]))]  # fmt: skip


def _computing(frame: StepFrame, kind: str) -> list[LaneSpan]:
    return [span for span in frame.spans if span.lane == "compute" and span.kind == kind]


def _ranks(frame: StepFrame, kind: str) -> list[int]:
    return [span.rank for span in _computing(frame, kind)]


def _carried(frame: StepFrame) -> list[Movement]:
    """Return what travels between ranks; what a worker hands a server of its own rank does not."""
    return [one for one in frame.movements if any(src != dst for src, dst, _ in one.pairs)]


def _worker(one: Movement) -> int:
    src, dst, _ = one.pairs[0]
    return src if one.kind == "push" else dst


def _pushed(movements: Sequence[Movement], at: float, ranks: int) -> list[int]:
    """Count the gradients of each worker that have come so far."""
    found = [0] * ranks
    for one in movements:
        if one.kind == "push" and one.end <= at + 1e-11:
            found[_worker(one)] += 1
    return found


def strategy_names(language: Language) -> dict[str, str]:
    """Return what each strategy is called."""
    return {name: words[LANGUAGES.index(language)] for name, words in NAMES.items()}
