"""Where everything of a recorded run lies on its timeline: a window of time, and rows of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roundelay.records import Event, RankRecord, RunRecord
from roundelay.view.languages import Language
from roundelay.view.perfetto import tracks
from roundelay.view.run_words import run_say

__all__ = ["RunRow", "RunWindow", "rows_of", "windows"]

MOST_WINDOWS = 12
MOST_CALLS = 400  # in a window of a run that is no training
PASSES = ("forward", "backward")
MOST_ROWS = 4  # of calls in the background of one rank


@dataclass(frozen=True, slots=True)
class RunWindow:
    """A stretch of a run: of one step, or of some calls."""

    name: str
    key: str  # for addresses
    start: int
    end: int
    own: Mapping[int, tuple[int, int] | None] | None = None  # by rank: its step, if it has that

    def of(self, rank: int) -> tuple[int, int] | None:
        """Return the part that is a rank's own: its step, which other ranks begin and end apart."""
        return (self.start, self.end) if self.own is None else self.own[rank]


@dataclass(frozen=True, slots=True)
class RunRow:
    """What one thread of a rank did in a window: each event, how deep it lies, and its end."""

    label: str  # a key of the words
    events: Sequence[tuple[Event, int, int]]


def windows(run: RunRecord, *, every: bool = False, language: Language = "en") -> list[RunWindow]:
    """Return the last few steps of a run, or `every` one; without steps, all of it or its end.

    A step lasts from its first pass to the end of the optimizer's step: on whichever rank these
    are first and last. What is each rank's own of it, the window has as well.
    """
    marks = {record.rank: _marks(record) for record in run.ranks}
    found = []
    for number in sorted({step for _, ends in marks.values() for step in ends}):
        start = min((begins[number] for begins, _ in marks.values() if number in begins), default=0)
        end = max(ends[number] for _, ends in marks.values() if number in ends)
        if start < end and any(number in begins for begins, _ in marks.values()):
            own = {rank: _own(number, (start, end), *mark) for rank, mark in marks.items()}
            name = run_say("step", language, number=number + 1)
            found.append(RunWindow(name, f"step-{number + 1}", start, end, own))
    if not found:
        return [_last_calls(run, language)]
    return found if every else found[-MOST_WINDOWS:]


def _marks(record: RankRecord) -> tuple[dict[int, int], dict[int, int]]:
    """Return when each step of a rank began, by its first pass, and when it ended."""
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    over = -1  # the last step
    for event in record.events:
        if event.kind == "step" and event.ended is not None:
            ends[event.call] = max(event.ended, ends.get(event.call, 0))
            over = event.call
        elif event.kind in PASSES and event.call > over:
            begins[event.call] = min(event.began, begins.get(event.call, event.began))
    return begins, ends


def _own(
    number: int, window: tuple[int, int], begins: Mapping[int, int], ends: Mapping[int, int]
) -> tuple[int, int] | None:
    """Return a rank's own part of a step; None where it has others, but not this one."""
    if not begins and not ends:
        return window  # it serves those that take steps
    if number not in begins and number not in ends:
        return None
    # A rank that died in the step has no end of it; one whose first events were overwritten has
    # no begin, but what it did since the step before.
    before = max((end for step, end in ends.items() if step < number), default=0)
    return begins.get(number, max(window[0], before)), ends.get(number, window[1])


def _last_calls(run: RunRecord, language: Language) -> RunWindow:
    begins = sorted(event.began for event in run.ranks[0].events) if run.ranks else []
    if len(begins) <= MOST_CALLS:
        return RunWindow(run_say("all", language), "all", 0, max(run.length, 1))
    start = begins[-MOST_CALLS]
    name = run_say("last events", language, count=MOST_CALLS)
    return RunWindow(name, "all", start, max(run.length, start + 1))


def rows_of(record: RankRecord, run: RunRecord, window: RunWindow) -> list[RunRow]:
    """Return the rows of a rank: its own thread, then its calls in the background."""
    found = []
    for number, track in enumerate(tracks(record, run.length)):
        events: list[tuple[Event, int, int]] = []
        open_: list[int] = []
        for event in track.events:
            end = run.length if event.ended is None else event.ended
            open_ = [each for each in open_ if each > event.began]
            if event.began < window.end and end > window.start:
                events.append((event, len(open_), end))
            open_.append(end)
        if number == 0:
            found.append(RunRow("computes", events))
        elif events and len(found) <= MOST_ROWS:
            found.append(RunRow(_row_name(events), events))
    return found


def _row_name(events: Sequence[tuple[Event, int, int]]) -> str:
    """Name a row after what most of its calls are for."""
    words = [event.title.partition(" ")[0] for event, _, _ in events]
    common = max(sorted(set(words)), key=words.count)
    return {"bucket": "buckets", "gather": "gathers", "send": "messages", "recv": "messages"}.get(
        common, "background"
    )
