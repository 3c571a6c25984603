"""Reads what ranks have written, also of a job that still runs or was killed.

The files may come from anywhere: all that they say of themselves is checked before it is believed,
and what they hold is text and numbers, nothing else. docs/tracing.md has the layout.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from roundelay.errors import RecordError
from roundelay.records.events import KINDS, WAYS, Event, RankRecord, RunRecord

__all__ = ["read_rank", "read_run"]

NAME = re.compile(r"rank-(\d{1,7})\.rdtrace")
MAGIC, VERSION = b"rdtrace\n", 1
HEADER = struct.Struct("<8s4I16s40s2q4Q4IQ8I2I2Q")
GROUP = struct.Struct("<Q2I")
EVENT = struct.Struct("<Q4q4Q3IiB7B")
SITES = 256  # strings that are source lines come first
MOST_BYTES = 1 << 28  # of one file
MOST_RANKS = 1 << 20
MOST_FILES = 4096
MOST_EVENTS = 2_000_000  # of all ranks; of more, each rank's last
LONGEST = 1 << 53  # nanoseconds from the first event to the last: a hundred days


class _Header(NamedTuple):
    magic: bytes
    version: int
    rank: int
    size: int
    pid: int
    job: bytes
    boot: bytes
    aligned: int
    wall: int
    bytes: int
    strings_at: int
    groups_at: int
    events_at: int
    string_bytes: int
    strings: int
    groups: int
    event_bytes: int
    events: int
    collectives_first: int
    collectives: int
    algorithms_first: int
    algorithms: int
    dtypes_first: int
    dtypes: int
    ops_first: int
    ops: int
    host: int
    program: int
    begun: int
    grouped: int


def read_run(folder: str | Path, *, links: bool = True) -> RunRecord:
    """Read the files of all ranks in a folder, and bring them to one clock.

    Where the folder has files of several jobs, it is the one whose files are newest. Without
    `links`, files that are links to others are left out.
    """
    where = Path(folder)
    files = _files(where, links=links)
    share = max(1, MOST_EVENTS // len(files))
    times = {path: path.stat().st_mtime_ns for path in files}
    every = {path: read_rank(path, most=share) for path in files}
    newest = every[max(every, key=lambda path: (every[path].wall, times[path]))].job
    found = sorted((one for one in every.values() if one.job == newest), key=lambda one: one.rank)
    left = [path.name for path, one in every.items() if one.job != newest]
    if len({one.rank for one in found}) < len(found) or len({one.size for one in found}) > 1:
        raise RecordError(str(where), "two files are of the same rank, or of jobs of other sizes")
    return _on_one_clock(found, left)


def _files(where: Path, *, links: bool) -> list[Path]:
    if not where.is_dir():
        raise RecordError(
            str(where), "there is no such folder", cure="`roundelay run --trace DIR` makes one."
        )
    found = sorted(path for path in where.iterdir() if NAME.fullmatch(path.name))
    files = [path for path in found if links or not path.is_symlink()]
    if not files:
        raise RecordError(
            str(where),
            "there is no rank-N.rdtrace in it",
            cure="`roundelay run --trace DIR script.py`, or RD_TRACE=DIR, writes them.",
        )
    if len(files) > MOST_FILES:
        raise RecordError(str(where), f"{len(files)} files are more than the {MOST_FILES} it takes")
    return files


def _on_one_clock(found: Sequence[RankRecord], left: Sequence[str]) -> RunRecord:
    """Shift each host's clock so that all ranks came together at the same time, and begin at 0."""
    first = {record.boot: record for record in reversed(found)}  # of every host
    at = found[0].aligned
    shifts = {boot: at - record.aligned for boot, record in first.items()}
    shifted = [[_moved(event, shifts[one.boot]) for event in one.events] for one in found]
    begins = [event.asked for events in shifted for event in events] or [at]
    ends = [event.ended or event.began for events in shifted for event in events] or [at]
    start = min(begins)
    length = max(ends) - start
    if length > LONGEST:
        raise RecordError(f"rank {found[0].rank}", "its times are further apart than any run lasts")
    ranks = [replace(one, events=[_moved(event, -start) for event in events])
             for one, events in zip(found, shifted, strict=True)]  # fmt: skip
    origin = found[0].wall + start - at
    return RunRecord(ranks, found[0].size, origin, length, len(first) > 1, left)


def _moved(event: Event, shift: int) -> Event:
    ended = None if event.ended is None else event.ended + shift
    return event._replace(asked=event.asked + shift, began=event.began + shift, ended=ended)


def read_rank(path: str | Path, *, most: int = MOST_EVENTS) -> RankRecord:
    """Read the file of one rank; its events are on its own clock, the last `most` of them."""
    name = str(path)
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RecordError(name, "it is not an ordinary file")
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RecordError(name, f"it can't be read: {error.strerror or error}") from error
    header = _header(name, data)
    strings = _Strings(header, data)
    boot = header.boot.split(b"\0")[0].decode("ascii", "replace")
    return RankRecord(
        rank=header.rank, size=header.size, pid=header.pid, host=strings.at(header.host),
        program=strings.at(header.program), job=header.job, boot=boot, aligned=header.aligned,
        wall=header.wall, begun=header.begun, groups=_groups(header, data),
        events=_events(header, data, strings, most),
    )  # fmt: skip


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting: a FIFO would wait for its writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _header(name: str, data: bytes) -> _Header:
    if len(data) > MOST_BYTES:
        raise RecordError(name, f"it is larger than {MOST_BYTES >> 20} MiB, which no rank writes")
    if not data.startswith(MAGIC):
        raise RecordError(name, "it is no trace of a rank, or was not yet begun")
    version = int.from_bytes(data[8:12], "little")
    if version != VERSION:
        raise RecordError(
            name,
            f"it has version {version} of the format, and this is version {VERSION}",
            cure="Read it with the version of roundelay that wrote it.",
        )
    if len(data) < HEADER.size:
        raise RecordError(name, "it ends in its header: it was cut off")
    header = _Header(*HEADER.unpack_from(data))
    parts = (
        (header.strings_at, header.strings, header.string_bytes),
        (header.groups_at, header.groups, GROUP.size),
        (header.events_at, header.events, EVENT.size),
    )
    if header.event_bytes != EVENT.size or not 1 <= header.string_bytes <= 4096:  # noqa: PLR2004
        raise RecordError(name, "its events or strings have a length that no version has")
    if any(at < HEADER.size or at + count * size > header.bytes for at, count, size in parts):
        raise RecordError(name, "its parts lie beyond its own end")
    if header.bytes > len(data):
        raise RecordError(name, f"it was cut off: {len(data)} of {header.bytes} bytes are there")
    if not (header.rank < header.size <= MOST_RANKS and header.events >= 1):
        raise RecordError(name, f"it says rank {header.rank} of {header.size}")
    return header


class _Strings:
    """The texts of a file, by number; what is not there is empty."""

    def __init__(self, header: _Header, data: bytes) -> None:
        self._header, self._data = header, data
        self._known: dict[int, str] = {}

    def at(self, number: int) -> str:
        """Return a text."""
        if number not in self._known:
            header, text = self._header, b""
            if 0 < number < header.strings:
                start = header.strings_at + number * header.string_bytes
                text = self._data[start : start + header.string_bytes].split(b"\0")[0]
            self._known[number] = text.decode("utf-8", "replace")
        return self._known[number]

    def of(self, table: str, number: int) -> str:
        """Return the name of a collective, an algorithm, a dtype or a reduction."""
        count: int = getattr(self._header, table)
        if number >= count:
            return ""
        first: int = getattr(self._header, f"{table}_first")
        return self.at(first + number).partition(":")[2]


def _groups(header: _Header, data: bytes) -> dict[int, tuple[int, int]]:
    rows = memoryview(data)[header.groups_at : header.groups_at + header.groups * GROUP.size]
    listed = list(GROUP.iter_unpack(rows))[: min(header.grouped, header.groups)]
    return {serial: (rank, size) for serial, rank, size in listed if rank < size <= MOST_RANKS}


def _events(header: _Header, data: bytes, strings: _Strings, most: int) -> list[Event]:
    rows = memoryview(data)[header.events_at : header.events_at + header.events * EVENT.size]
    found = []
    for place, row in enumerate(EVENT.iter_unpack(rows)):
        # One that was being written when its rank was killed has no number.
        if row[0] and (row[0] - 1) % header.events == place and row[0] <= header.begun:
            found.append(row)
    found.sort()
    return [one for row in found[-most:] if (one := _event(row, strings)) is not None]


def _event(row: tuple[int, ...], strings: _Strings) -> Event | None:
    number, asked, began, ended, waited, call, nbytes, group, count = row[:9]
    site, name, thread, waits_for, kind, collective, algorithm, dtype, op, failed, way, _ = row[9:]
    if kind >= len(KINDS) or not 0 < asked <= began or (ended and ended < began):
        return None
    return Event(
        number=number, kind=KINDS[kind], name=strings.at(name), site=strings.at(site), asked=asked,
        began=began, ended=ended or None, waited=max(0, waited), waits_for=waits_for, call=call,
        group=group, nbytes=nbytes, elements=count,
        collective=strings.of("collectives", collective),
        algorithm=strings.of("algorithms", algorithm), dtype=strings.of("dtypes", dtype),
        op=strings.of("ops", op), thread=thread, failed=bool(failed),
        way=WAYS[way] if way < len(WAYS) else "",
    )  # fmt: skip
