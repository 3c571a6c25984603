"""A recorded run in the trace event format, which Perfetto and chrome://tracing open.

A process for every rank, a track for each of its threads. An arrow leads from the rank that came
last to a call to those that waited for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from roundelay.records import Event, RankRecord, RunRecord
from roundelay.view.captions import printable

__all__ = ["perfetto"]

Json = dict[str, Any]
MAIN, BESIDE = "computes", "calls in the background"


def perfetto(run: RunRecord) -> str:
    """Return the JSON: times are microseconds since the record begins."""
    events: list[Json] = []
    places: dict[tuple[int, int], int] = {}  # of events that are calls: their track
    for record in run.ranks:
        events += _names(record)
        for number, track in enumerate(tracks(record, run.length)):
            for event in track.events:
                places[record.rank, event.number] = number
                events.append(_slice(record, number, event, run.length))
            events.append(_named("thread_name", record.rank, number, name=track.name))
            events.append(_named("thread_sort_index", record.rank, number, sort_index=number))
    events += _arrows(run, places)
    program = printable(run.ranks[0].program) if run.ranks else ""
    told = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"program": program}}
    return json.dumps(told, separators=(",", ":"))


class Track:
    """Events of one thread, of which each lies inside another or beside it."""

    def __init__(self, name: str) -> None:
        self.name, self.events = name, list[Event]()
        self._open: list[int] = []  # ends of those that the next may lie in

    def takes(self, event: Event, end: int) -> bool:
        """Take an event, unless it began in another and ends outside."""
        open_ = [each for each in self._open if each > event.began]
        if any(each < end for each in open_):
            return False
        self._open = [*open_, end]
        self.events.append(event)
        return True


def tracks(record: RankRecord, length: int) -> list[Track]:
    """Return the tracks of a rank: first that of its own thread."""
    found: dict[int, list[Track]] = {record.main_thread: [Track(MAIN)]}
    order = sorted(record.events, key=lambda one: (one.began, -(one.ended or length), one.number))
    for event in order:
        mine = found.setdefault(event.thread, [])
        end = length if event.ended is None else event.ended
        if not any(track.takes(event, end) for track in mine):
            mine.append(Track(BESIDE))
            mine[-1].takes(event, end)
    return [track for mine in found.values() for track in mine]


def _names(record: RankRecord) -> Iterator[Json]:
    host = f" on {record.host}" if record.host else ""
    yield _named("process_name", record.rank, 0, name=printable(f"rank {record.rank}{host}"))
    yield _named("process_sort_index", record.rank, 0, sort_index=record.rank)


def _named(what: str, rank: int, track: int, **args: object) -> Json:
    return {"name": what, "ph": "M", "pid": rank, "tid": track, "args": args}


def _slice(record: RankRecord, track: int, event: Event, length: int) -> Json:
    end = length if event.ended is None else event.ended
    args: Json = {"step": event.call}
    if event.kind == "call":
        args = {
            "call": event.call, "group": event.group, "collective": event.collective,
            "algorithm": event.algorithm, "way": event.way, "dtype": event.dtype, "op": event.op,
            "elements": event.elements, "bytes": event.nbytes, "line": printable(event.site),
            "waited_us": event.waited / 1e3, "waits_for_rank": event.waits_for,
            "queued_us": (event.began - event.asked) / 1e3,
        }  # fmt: skip
    elif event.kind == "message":
        args = {"bytes": event.nbytes}
    if event.ended is None:
        args["unfinished"] = True
    if event.failed:
        args["failed"] = True
    return {"name": printable(event.title), "cat": event.kind, "ph": "X", "pid": record.rank,
            "tid": track, "ts": _us(event.began), "dur": _us(end - event.began),
            "args": args}  # fmt: skip


def _arrows(run: RunRecord, places: dict[tuple[int, int], int]) -> Iterator[Json]:
    """Yield, for each call, an arrow from who came last to everyone who waited for it."""
    together: dict[tuple[int, int], list[tuple[int, Event]]] = {}
    for rank, event in run.calls():
        together.setdefault((event.group, event.call), []).append((rank, event))
    number = 0
    for calls in together.values():
        rank, last = max(calls, key=lambda one: one[1].began)
        for other, event in calls:
            end = run.length if event.ended is None else event.ended
            at = end - 1  # inside the call, or it would point at nothing
            if other == rank or not event.waited or at < max(last.began, event.began):
                continue
            if last.ended is not None and last.ended <= last.began:
                continue
            number += 1
            same = {"name": "waits for", "cat": "wait", "id": number}
            yield {**same, "ph": "s", "pid": rank, "tid": places[rank, last.number],
                   "ts": _us(last.began)}  # fmt: skip
            yield {**same, "ph": "f", "bp": "e", "pid": other, "tid": places[other, event.number],
                   "ts": _us(at)}  # fmt: skip


def _us(ns: int) -> float:
    return ns / 1e3
