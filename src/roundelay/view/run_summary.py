"""Where the time of a recorded run went: for every rank, and for whom the others waited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from roundelay.records import Event, RankRecord, RunRecord
from roundelay.view.run_lanes import RunWindow

__all__ = ["RankTimes", "RunSummary", "summary"]

#: Phases in which a rank computes, so that calls beside them cost no time.
COMPUTES = ("forward", "backward", "step")

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Nanoseconds of one rank."""

    rank: int
    phases: Mapping[str, int]  # of its own thread; what lies inside another counts in both
    calls: int  # how many it made
    nbytes: int  # of their largest buffers
    in_calls: int  # on its own thread
    waited: int  # for other ranks, in all calls
    background: int  # in calls beside its own thread
    hidden: int  # of that, while it computed
    waited_for: Mapping[int, int]  # by rank
    unfinished: str  # what it was in when the record ended, if in anything

    @property
    def overlap(self) -> float | None:
        """The share of background calls that computing hid; None where there were none."""
        return self.hidden / self.background if self.background else None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """All ranks."""

    length: int
    steps: int
    ranks: Sequence[RankTimes]

    @property
    def straggler(self) -> tuple[int, int] | None:
        """The rank that others waited for longest, and the sum of it; None where nobody waited."""
        total: Counter[int] = Counter()
        for rank in self.ranks:
            total.update(rank.waited_for)
        found = total.most_common(1)
        return found[0] if found and found[0][1] else None

    def as_json(self) -> dict[str, object]:
        """Return it with seconds, for scripts."""
        straggler = self.straggler
        return {
            "seconds": self.length / 1e9,
            "steps": self.steps,
            "straggler": None if straggler is None else straggler[0],
            "ranks": [
                {
                    "rank": one.rank,
                    "calls": one.calls,
                    "bytes": one.nbytes,
                    "in_calls": one.in_calls / 1e9,
                    "waited": one.waited / 1e9,
                    "waited_for": {str(k): v / 1e9 for k, v in one.waited_for.items()},
                    "background": one.background / 1e9,
                    "overlap": one.overlap,
                    "phases": {kind: ns / 1e9 for kind, ns in one.phases.items()},
                    "unfinished": one.unfinished,
                }
                for one in self.ranks
            ],
        }


def summary(run: RunRecord, window: RunWindow | None = None) -> RunSummary:
    """Sum up a run, or a window of it: of a step, what is each rank's own.

    A call counts where it was made; of its time, that which lies inside.
    """
    whole = RunWindow("", "", 0, run.length) if window is None else window
    own = [(record, whole.of(record.rank)) for record in run.ranks]
    steps = {event.call for record, span in own if span is not None for event in record.events
             if event.kind == "step" and _inside(event.began, span)}  # fmt: skip
    ranks = [_times(record, run.length, span) for record, span in own]
    return RunSummary(whole.end - whole.start, len(steps), ranks)


def _inside(at: int, span: Span) -> bool:
    return span[0] <= at <= span[1]


def _times(record: RankRecord, length: int, window: Span | None) -> RankTimes:
    main, phases, waited_for = record.main_thread, Counter[str](), Counter[int]()
    calls = nbytes = in_calls = waited = 0
    beside: list[Span] = []
    computing: list[Span] = []
    standing: list[Span] = []  # its own thread, for a call to end
    unfinished = ""
    for event in record.events:
        whole = event.began, length if event.ended is None else event.ended
        span = None if window is None else cut(whole, window)
        if event.ended is None and not (event.kind == "message" and event.thread != main):
            unfinished = described(event)
        if event.kind == "call" and window is not None and _inside(event.asked, window):
            calls, nbytes = calls + 1, nbytes + event.nbytes
        if span is None:
            continue
        took = span[1] - span[0]
        if event.kind != "call":
            phases[event.kind] += took
            if event.kind in COMPUTES:
                computing.append(span)
            if event.kind == "gather":
                standing.append(span)
            continue
        waited += min(event.waited, took)
        if event.waits_for >= 0:
            waited_for[event.waits_for] += min(event.waited, took)
        if event.thread == main:
            in_calls += took
            standing.append(span)
        else:
            beside.append(span)
    hidden = common(merged(beside), without(merged(computing), merged(standing)))
    background = sum(last - first for first, last in merged(beside))
    return RankTimes(record.rank, dict(phases), calls, nbytes, in_calls, waited, background, hidden,
                     dict(waited_for), unfinished)  # fmt: skip


def described(event: Event) -> str:
    """Say what an event is, in a line."""
    if event.kind != "call":
        numbered = event.kind not in ("gather", "message")
        return f"{event.title}, step {event.call}" if numbered else event.title
    what = f"{event.collective} #{event.call}"
    name = f" ({event.name})" if event.name else ""
    return f"{what}{name}{f' at {event.site}' if event.site else ''}"


def cut(span: Span, window: Span) -> Span | None:
    """Return what of a span lies in a window.

    >>> cut((2, 9), (4, 6)), cut((0, 3), (4, 6))
    ((4, 6), None)
    """
    first, last = max(span[0], window[0]), min(span[1], window[1])
    return (first, last) if first <= last and span[1] >= window[0] else None


def merged(spans: Iterable[Span]) -> list[Span]:
    """Join spans that overlap.

    >>> merged([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    found: list[Span] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Cut holes into spans, both in order and without overlaps.

    >>> without([(0, 9)], [(2, 3), (8, 12)])
    [(0, 2), (3, 8)]
    """
    found = []
    for first, last in spans:
        at = first
        for start, end in holes:
            if end > at and start < last:
                if start > at:
                    found.append((at, start))
                at = end
        if at < last:
            found.append((at, last))
    return found


def common(one: Sequence[Span], other: Sequence[Span]) -> int:
    """Return how long two lists of spans, each without overlaps, have in common.

    >>> common([(0, 4), (6, 9)], [(2, 7)])
    3
    """
    total = at = 0
    for first, last in one:
        while at < len(other) and other[at][1] <= first:
            at += 1
        step = at
        while step < len(other) and other[step][0] < last:
            total += min(last, other[step][1]) - max(first, other[step][0])
            step += 1
    return total
