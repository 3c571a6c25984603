"""Files of traces: what is written is what is read, and what is broken is refused."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from roundelay import _core
from roundelay.errors import RecordError
from roundelay.records import read_rank, read_run
from roundelay.records.events import KINDS, WAYS
from roundelay.records.read import EVENT, HEADER, VERSION

JOB = bytes(range(16))
RANK, SIZE, BYTES, STRINGS, EVENTS, EVENT_BYTES = 12, 16, 96, 132, 144, 140  # where they lie


def write(folder: Path, rank: int = 0, size: int = 1, *, events: int = 8, count: int = 3) -> Path:
    path = folder / f"rank-{rank}.rdtrace"
    trace = _core.Trace(str(path), rank, size, JOB, events)
    trace.describe("host", "train.py")
    trace.set_table("collective", ["all_reduce", "barrier"])
    trace.list_group(0, rank, size)
    for number in range(count):
        trace.end(trace.begin(KINDS.index("forward"), trace.string("a name"), number))
    return path


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_only_ordinary_files_are_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    write(tmp_path, rank=0, size=2)
    make(tmp_path / "rank-1.rdtrace")
    with pytest.raises(RecordError, match=r"rank-1\.rdtrace.*(ordinary file|Is a directory)"):
        read_run(tmp_path)


def test_kinds_are_the_native_ones() -> None:
    assert KINDS == _core.TRACED
    assert ("", *_core.TRACED_WAYS) == WAYS


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 50])
def test_the_ring_keeps_the_last_events(tmp_path: Path, count: int) -> None:
    record = read_rank(write(tmp_path, events=8, count=count))
    assert record.begun == count
    assert [event.call for event in record.events] == [*range(max(0, count - 8), count)]
    assert record.dropped == max(0, count - 8)
    for event in record.events:
        assert (event.kind, event.name) == ("forward", "a name")
        assert event.ended is not None
        assert 0 < event.began <= event.ended


def test_an_event_that_never_ended_is_under_way(tmp_path: Path) -> None:
    trace = _core.Trace(str(tmp_path / "rank-0.rdtrace"), 0, 1, JOB)
    trace.begin(KINDS.index("step"))
    assert [event.ended for event in read_rank(trace.path).events] == [None]


def test_an_end_that_was_overtaken_by_a_whole_ring_changes_nothing(tmp_path: Path) -> None:
    trace = _core.Trace(str(tmp_path / "rank-0.rdtrace"), 0, 1, JOB, 4)
    first = trace.begin(KINDS.index("step"), 0, 77)
    for number in range(4):
        trace.begin(KINDS.index("forward"), 0, number)
    trace.end(first)
    assert [event.ended for event in read_rank(trace.path).events] == [None] * 4


def test_texts_are_cut_at_a_character_and_beyond_the_table_are_empty(tmp_path: Path) -> None:
    trace = _core.Trace(str(tmp_path / "rank-0.rdtrace"), 0, 1, JOB)
    trace.begin(1, trace.string("ü" * 200))
    numbers = [trace.string(f"text {number}") for number in range(1100)]
    assert numbers[-1] == 0
    trace.begin(1, numbers[-1])
    names = [event.name for event in read_rank(trace.path).events]
    assert names == ["ü" * 79, ""]


@pytest.mark.parametrize("length", [0, 4, 8, 12, 100, HEADER.size - 1, HEADER.size, 5000, -1])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, length: int) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(RecordError, match=r"rank-0.rdtrace: .*(cut off|no trace|version)"):
        read_rank(path)


@pytest.mark.parametrize(
    ("at", "form", "value", "said"),
    [
        (8, "I", VERSION + 1, "version 2"),
        (RANK, "I", 9, "rank 9 of 1"),
        (SIZE, "I", 0, "rank 0 of 0"),
        (SIZE, "I", 1 << 31, "of 2147483648"),
        (BYTES, "Q", 1 << 62, "cut off"),
        (BYTES + 8, "Q", 1 << 63, "beyond its own end"),
        (BYTES + 24, "Q", 0, "beyond its own end"),
        (STRINGS, "I", 0xFFFFFFFF, "beyond its own end"),
        (EVENTS, "Q", 1 << 60, "beyond its own end"),
        (EVENT_BYTES, "I", 95, "no version has"),
        (EVENT_BYTES - 12, "I", 0, "no version has"),
    ],
)
def test_a_header_that_lies_is_refused(
    tmp_path: Path, at: int, form: str, value: int, said: str
) -> None:
    path = write(tmp_path)
    data = bytearray(path.read_bytes())
    struct.pack_into(f"<{form}", data, at, value)
    path.write_bytes(data)
    with pytest.raises(RecordError, match=said):
        read_rank(path)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_bytes_are_it_reads_or_refuses(
    tmp_path: Path, seed: int, noise: Callable[[int, int], bytes]
) -> None:
    path = write(tmp_path, count=5)
    data = bytearray(path.read_bytes())
    spoilt = noise(seed, 64)
    for place in range(0, 64, 4):
        number = int.from_bytes(spoilt[place : place + 3], "little")
        where = number % HEADER.size if seed % 2 else len(data) - 1 - number % (9 * EVENT.size)
        data[where] = spoilt[place + 3]
    path.write_bytes(data)
    try:
        run = read_run(tmp_path)
    except RecordError:
        return
    for event in run.ranks[0].events:
        assert event.kind in KINDS
        assert event.began >= 0


def test_of_several_jobs_the_newest_is_read(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, rank, 3)
    for rank in range(2):
        path = tmp_path / f"rank-{rank}.rdtrace"
        _core.Trace(str(path), rank, 2, bytes(16)).begin(1)
    run = read_run(tmp_path)
    assert (run.size, [record.rank for record in run.ranks]) == (2, [0, 1])
    assert run.left_out == ["rank-2.rdtrace"]


def test_clocks_of_several_hosts_meet_at_the_barrier(tmp_path: Path) -> None:
    paths = [write(tmp_path, rank, 2, count=1) for rank in range(2)]
    ahead = 10**15
    data = bytearray(paths[1].read_bytes())
    fields = list(HEADER.unpack_from(data))
    fields[6] = b"another boot".ljust(40, b"\0")
    fields[7] += ahead
    HEADER.pack_into(data, 0, *fields)
    at = fields[12]
    event = list(EVENT.unpack_from(data, at))
    event[1:4] = [time + ahead for time in event[1:4]]
    EVENT.pack_into(data, at, *event)
    paths[1].write_bytes(data)
    run = read_run(tmp_path)
    assert run.several_clocks
    assert run.length < 10**12


def test_what_is_no_folder_of_traces_says_how_to_make_one(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(RecordError, match="--trace DIR"):
            read_run(folder)


def test_a_folder_that_can_not_be_written_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"open"):
        _core.Trace(str(tmp_path / "none" / "rank-0.rdtrace"), 0, 1, JOB)
