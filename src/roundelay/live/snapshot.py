"""What every rank of a job does at this moment, whom it waits for, and who keeps all waiting."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roundelay import _core
from roundelay.live.hang_words import live_ranks, live_say
from roundelay.live.world_report import WorldReport

__all__ = ["JobNow", "RankNow", "look"]

STOPPED_NS = 500_000_000  # without a heartbeat, of which there are ten a second
HANGS_S = 2.0  # a wait of so long is worth a sentence


@dataclass(frozen=True, slots=True)
class RankNow:
    """One rank at one moment."""

    rank: int
    pid: int
    #: absent, computes, calls, waits, stopped, ended, left or dead
    state: str
    step: int | None  # of training
    call: str  # 'all_reduce float32[1024] op=sum (ring)': the one it is in, or made last
    number: int  # of that call in its group; 0 for messages, and for a rank that is through
    group: str  # ' in group 3 (ranks 0, 2)'; nothing for the group of all ranks
    site: str
    waits_for: int | None  # the rank that it waits for; -1: any
    waited: float  # seconds
    moved: int  # bytes of all its calls so far


@dataclass(frozen=True, slots=True)
class JobNow:
    """All ranks at one moment."""

    at: float  # by the monotonic clock
    ranks: Sequence[RankNow]
    straggler: int | None  # for whom the most ranks wait, at the end of all waiting
    hangs: str  # what the job hangs on, in a sentence; empty while it does not
    trouble: str  # what has gone wrong, if anything has

    @property
    def over(self) -> bool:
        """Whether no rank is at work any more."""
        return all(rank.state in ("left", "dead", "ended") for rank in self.ranks)


def look(world: _core.World, algorithms: Sequence[str], language: str = "en") -> JobNow:
    """Look at all ranks once; `algorithms` has the names of algorithms by number."""
    report, now = WorldReport(world, algorithms, language), time.monotonic_ns()
    ranks = [_rank(world, report, rank, now) for rank in range(world.size)]
    straggler = _blamed({one.rank: one.waits_for for one in ranks
                         if one.waits_for is not None and one.state != "stopped"})  # fmt: skip
    if straggler is None:
        straggler = next((one.rank for one in ranks if one.state in ("stopped", "dead")), None)
    hangs = _hangs(ranks, straggler, report, language)
    return JobNow(now / 1e9, ranks, straggler, hangs, _trouble(world, ranks, language))


def _rank(world: _core.World, report: WorldReport, rank: int, now: int) -> RankNow:
    life, beat = _core.LIVES[world.life(rank)], world.heartbeat(rank)
    at, number, over, moved = world.now(rank)
    waits = world.waits(rank)
    state = {"alive": "computes" if over else "calls", "ended": "ended", "left": "left",
             "dead": "dead", "absent": "absent"}[life]  # fmt: skip
    what, site, group, other, since = "", "", "", None, now
    if waits and life == "alive":
        state = "waits"
        kind, at, wanted, other, _, site, since = waits[0]
        if kind != _core.WAITS.index("call"):
            what = report.message(rank, waits[0])
            group, number = _group(report, at), 0
        else:
            number = wanted
    if not what and at:
        number, what, site, group = _call(world, report, rank, at, number)
    if life == "alive" and beat and now - beat > STOPPED_NS:
        state = "stopped"
    step = world.step(rank)
    waited = (now - since) / 1e9 if other is not None else 0.0
    return RankNow(rank, world.pid(rank), state, step - 1 if step else None, what, number, group,
                   site, other, waited, moved)  # fmt: skip


def _group(report: WorldReport, at: int) -> str:
    """Name the group that lies there; nothing where none does, or none any more."""
    try:
        return report.group(at)
    except IndexError:
        return ""


def _call(
    world: _core.World, report: WorldReport, rank: int, at: int, number: int
) -> tuple[int, str, str, str]:
    """Return a call of a rank: its number, what it is, the line, and the group that lies there."""
    try:
        records = {member: pair for member, *pair in world.calls(at, number)[2]}
        if rank not in records:
            return 0, "", "", ""
        asked, latest = records[rank]
        record = asked if asked[0] == number else latest
        what = report.called(record) if record[0] else ""
        shown = 0 if record[1] == _core.ENDING else record[0]
        return shown, what, record[7], report.group(at)
    except (IndexError, KeyError):  # the group was let go of, and its memory is another's
        return 0, "", "", ""


def _blamed(waits_for: Mapping[int, int]) -> int | None:
    """Return the rank at the end of most waiting; None where nobody waits, or in a circle.

    >>> _blamed({0: 1, 1: 2, 3: 2}), _blamed({}), _blamed({0: 1, 1: 0})
    (2, None, None)
    """
    ends: Counter[int] = Counter()
    for start in waits_for:
        seen, at = {start}, waits_for[start]
        while at in waits_for and at not in seen:
            seen.add(at)
            at = waits_for[at]
        if at >= 0 and at not in seen:
            ends[at] += 1
    return max(ends, key=lambda rank: (ends[rank], -rank)) if ends else None


def _hangs(
    ranks: Sequence[RankNow], straggler: int | None, report: WorldReport, language: str
) -> str:
    waiting = [one for one in ranks if one.waits_for is not None]
    if straggler is None:
        longest = max((one.waited for one in waiting), default=0.0)
        pairs = report.circle_of() if longest > HANGS_S else []
        steps = [live_say("circle step", language, rank=one, other=other) for one, other in pairs]
        return live_say("circle", language, steps=_listed(steps, language)) if steps else ""
    their = [one for one in waiting if one.rank != straggler and one.waited > HANGS_S]
    culprit = ranks[straggler]
    if not their:
        return _condition(culprit, language) if culprit.state in ("stopped", "dead") else ""
    what = {f"{one.call.split(' ')[0]} #{one.number}" for one in their if one.number}
    told = live_say(
        "wait" if len(their) > 1 else "waits",
        language,
        who=live_ranks([one.rank for one in their], language),
        rank=straggler,
        calls=live_say("calls", language, calls=_listed(sorted(what), language)) if what else "",
        time=f"{max(one.waited for one in their):.1f}",
    )
    return f"{told}{' ' if language == 'en' else ''}{_condition(culprit, language)}"


def _listed(words: Sequence[str], language: str) -> str:
    return ("、" if language == "zh" else ", ").join(words)


def _condition(rank: RankNow, language: str) -> str:
    """Say what is known of a rank that keeps others waiting."""
    known = ("stopped", "dead", "left", "ended")
    key = "calls now" if rank.state == "calls" else rank.state
    last = f"{rank.call.split(' ')[0]} #{rank.number}" if rank.number else rank.call
    return live_say(
        key if key in (*known, "calls now") else "computes",
        language,
        who=live_say("who", language, rank=rank.rank, pid=rank.pid),
        last=last or live_say("none", language),
        where=live_say("where", language, site=rank.site) if rank.site else "",
    )


def _trouble(world: _core.World, ranks: Sequence[RankNow], language: str) -> str:
    if world.trouble is None:
        return ""
    kind, culprit, finder, _, _, text = world.trouble
    site = ranks[culprit].site if culprit < len(ranks) else ""
    where = live_say("last seen", language, site=site) if site else ""
    key = kind if kind in ("mismatch", "lost", "timeout", "failed") else "interrupted"
    return live_say(key, language, rank=culprit, finder=finder, where=where, text=text)
