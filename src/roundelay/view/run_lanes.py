"""Where everything of a recorded run lies on its timeline: a window of time, and rows of ranks."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class RunRow:
    """What one thread of a rank did in a window: each event, how deep it lies, and its end."""

    label: str  # a key of the words
    events: Sequence[tuple[Event, int, int]]


def windows(run: RunRecord, *, every: bool = False, language: Language = "en") -> list[RunWindow]:
    """Return the last few steps of a run, or `every` one; without steps, all of it or its end.

    A step lasts from its first pass to the end of the optimizer's step: on whichever rank these
    are first and last.
    """
    ends: dict[int, int] = {}
    begins: dict[int, int] = {}
    for record in run.ranks:
        over = -1  # the last step of this rank
        for event in record.events:
            if event.kind == "step" and event.ended is not None:
                ends[event.call] = max(event.ended, ends.get(event.call, 0))
                over = event.call
            elif event.kind in PASSES and event.call > over:
                begins[event.call] = min(event.began, begins.get(event.call, event.began))
    found = [
        RunWindow(
            run_say("step", language, number=number + 1),
            f"step-{number + 1}",
            begins[number],
            ends[number],
        )
        for number in sorted(ends)
        if number in begins and begins[number] < ends[number]
    ]
    if not found:
        return [_last_calls(run, language)]
    return found if every else found[-MOST_WINDOWS:]


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
