"""The trace event format: what Perfetto and Chrome would warn of is not in it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from roundelay.records import RankRecord, RunRecord
from roundelay.view.perfetto import perfetto

MS = 1_000_000  # nanoseconds
Json = dict[str, Any]
Tracks = dict[tuple[int, int], list[tuple[float, float]]]


def problems(text: str) -> list[str]:
    """Find what a strict reader of the format would complain of."""
    events: list[Json] = json.loads(text)["traceEvents"]
    found = [f"phase {one['ph']}" for one in events if one["ph"] not in "XMsf"]
    found += [f"no {field}: {one}" for one in events for field in ("name", "pid", "tid")
              if field not in one]  # fmt: skip
    tracks: Tracks = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            tracks[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
            if one["ts"] < 0 or one["dur"] < 0:
                found.append(f"time: {one}")
    named = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    found += [f"track {place} has no name" for place in tracks if place not in named]
    return [*found, *torn(tracks), *lost_arrows(events, tracks)]


def torn(tracks: Tracks) -> Iterator[str]:
    """Yield slices that begin in another and end outside."""
    for place, spans in tracks.items():
        open_: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            open_ = [each for each in open_ if each > start]
            if any(each < end for each in open_):
                yield f"{place}: {start} to {end} begins in another and ends outside"
            open_.append(end)


def lost_arrows(events: list[Json], tracks: Tracks) -> Iterator[str]:
    """Yield arrows without two ends, or that point at nothing."""
    flows: dict[int, list[Json]] = defaultdict(list)
    for one in events:
        if one["ph"] in "sf":
            flows[one["id"]].append(one)
    for number, ends in flows.items():
        if [one["ph"] for one in ends] != ["s", "f"] or ends[0]["ts"] > ends[1]["ts"]:
            yield f"flow {number}: {ends}"
        for one in ends:
            inside = tracks[one["pid"], one["tid"]]
            if not any(start <= one["ts"] < end for start, end in inside):
                yield f"flow {number} points at nothing"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_nothing_to_complain_of(runs: Any, size: int) -> None:
    text = perfetto(runs.made(size))
    assert problems(text) == []
    events = json.loads(text)["traceEvents"]
    assert {one["pid"] for one in events} == {*range(size)}
    # In each of two steps, all but the late rank waited for it.
    assert sum(one["ph"] == "s" for one in events) == 2 * (size - 1)
    assert {one["pid"] for one in events if one["ph"] == "s"} == ({size - 1} if size > 1 else set())


def test_calls_that_overlap_have_tracks_of_their_own(runs: Any) -> None:
    events = [
        runs.call(1, 0, 4),
        runs.call(2, 2, 6),
        runs.call(3, 3, 5),
        runs.event(4, "step", 7, None),
    ]
    record = RankRecord(0, 1, 100, "", "", b"", "", 0, 0, 4, {0: (0, 1)}, events)
    text = perfetto(RunRecord([record], 1, 0, 10 * MS))
    assert problems(text) == []
    slices = [one for one in json.loads(text)["traceEvents"] if one["ph"] == "X"]
    assert len({one["tid"] for one in slices}) == 2
    assert [one["args"].get("unfinished") for one in slices if one["cat"] == "step"] == [True]


def test_the_checker_sees_what_is_wrong(runs: Any) -> None:
    data = json.loads(perfetto(runs.made(2)))
    events = data["traceEvents"]
    first = next(one for one in events if one["ph"] == "X")
    for broken in (
        {**first, "ts": first["ts"] + 1, "dur": 1e6},
        {**first, "tid": 77},
        {"name": "x", "ph": "s", "id": 9, "pid": 0, "tid": 0, "ts": 0},
        {**first, "dur": -1},
    ):
        assert problems(json.dumps({"traceEvents": [*events, broken]})) != []
