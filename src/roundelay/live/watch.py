"""A job watched for a while: for rates, and for who keeps others waiting."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from roundelay import _core
from roundelay.live.jobs import LiveJob, command_of
from roundelay.live.snapshot import JobNow, RankNow, look

__all__ = ["JobSeen", "JobWatch"]

BETWEEN_S = 0.02  # looks


@dataclass(frozen=True, slots=True)
class JobSeen:
    """A job over a short time: how it is at its end, and what happened meanwhile."""

    now: JobNow
    rates: Sequence[float]  # of every rank, in bytes a second
    blame: Sequence[float]  # of every rank: the share of looks in which others waited for it
    command: str
    pids: Sequence[int]

    @property
    def straggler(self) -> int | None:
        """The rank that others waited for most of the time; None where nobody waited often."""
        if not self.blame or max(self.blame) < 0.5:  # noqa: PLR2004 - half of the time
            return None
        return max(range(len(self.blame)), key=lambda rank: self.blame[rank])

    def as_json(self) -> dict[str, object]:
        """Return all of it for scripts."""
        ranks = [self._rank(one) for one in self.now.ranks]
        return {
            "command": self.command,
            "processes": list(self.pids),
            "ranks": ranks,
            "straggler": self.straggler,
            "hangs": self.now.hangs,
            "trouble": self.now.trouble,
        }

    def _rank(self, one: RankNow) -> dict[str, object]:
        return {
            "rank": one.rank,
            "process": one.pid,
            "state": one.state,
            "step": one.step,
            "call": one.call,
            "number": one.number,
            "group": one.group.strip(),
            "site": one.site,
            "waits_for": one.waits_for,
            "waited_seconds": round(one.waited, 6),
            "bytes_per_second": round(self.rates[one.rank]),
            "waited_for": round(self.blame[one.rank], 3),
        }


class JobWatch:
    """Looks at one job again and again, without touching anything of it."""

    def __init__(self, job: LiveJob, algorithms: Sequence[str], language: str = "en") -> None:
        self.job, self._algorithms, self._language = job, algorithms, language
        self._world: _core.World = job.world()
        self._before = self._look()
        self._blamed: Counter[int] = Counter()
        self._looks = 0

    def _look(self) -> JobNow:
        return look(self._world, self._algorithms, self._language)

    def for_a_while(self, seconds: float) -> JobSeen:
        """Look for so long, and return what was seen."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(BETWEEN_S)
            self.glance()
        return self.seen()

    def glance(self) -> None:
        """Look who keeps others waiting."""
        self._looks += 1
        straggler = self._look().straggler
        if straggler is not None:
            self._blamed[straggler] += 1

    def seen(self) -> JobSeen:
        """Return what was seen since the last time."""
        now, before = self._look(), self._before
        seconds = max(now.at - before.at, 1e-9)
        rates = [(one.moved - old.moved) / seconds
                 for one, old in zip(now.ranks, before.ranks, strict=True)]  # fmt: skip
        blame = [self._blamed[one.rank] / max(1, self._looks) for one in now.ranks]
        self._before, self._looks = now, 0
        self._blamed.clear()
        own = next((one.pid for one in now.ranks if one.pid in self.job.pids), self.job.pids[0])
        return JobSeen(now, rates, blame, command_of(own), self.job.pids)
