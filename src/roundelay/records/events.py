"""The records of a run: events of every rank, on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["KINDS", "WAYS", "Event", "RankRecord", "RunRecord"]

#: What an event can be, by number; the native core has the same list as `TRACED`.
KINDS = ("call", "forward", "backward", "exchange", "gather", "step", "checkpoint", "phase",
         "message")  # fmt: skip

#: By which way a call ran; the first is for engines that have one only.
WAYS = ("", "slots", "slots past caches", "reading", "reading past caches", "arena")


class Event(NamedTuple):
    """Something that a thread of a rank did; times are nanoseconds since the record begins."""

    number: int  # in the order of their begin, from 1
    kind: str
    name: str  # what for: 'bucket 0: head.weight'; empty where nobody said
    site: str  # the user's line: 'train.py:12'
    asked: int  # when the call was made, where that is before it began
    began: int
    ended: int | None  # None: it was under way when the record ended
    waited: int  # nanoseconds of it, for other ranks
    waits_for: int  # the rank that it waited for longest, or -1
    call: int  # the number of the call in its group; of other kinds the step
    group: int  # 0 is the group of all ranks
    nbytes: int  # of the largest buffer of any rank
    elements: int  # of a block
    collective: str
    algorithm: str
    dtype: str
    op: str
    thread: int
    failed: bool
    way: str = ""  # of a call that has several: by slots, by reading others' memory, in the arena

    @property
    def title(self) -> str:
        """What to call it."""
        if self.kind == "call":
            return self.name or self.collective
        return self.name or self.kind


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank did."""

    rank: int
    size: int
    pid: int
    host: str
    program: str
    job: bytes
    boot: str
    aligned: int  # nanoseconds of its clock, when all ranks had come together
    wall: int  # and by the calendar, since 1970
    begun: int  # events in all; the ring has the last of them
    groups: Mapping[int, tuple[int, int]]  # by serial: its rank in it, and the size
    events: Sequence[Event]  # by the time they began

    @property
    def main_thread(self) -> int:
        """The thread that the rank's own code runs on."""
        return self.pid if any(event.thread == self.pid for event in self.events) else (
            self.events[0].thread if self.events else self.pid
        )  # fmt: skip

    @property
    def dropped(self) -> int:
        """How many events came before those that are there."""
        return self.begun - len(self.events)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What all ranks did, on one clock: nanoseconds since `origin`."""

    ranks: Sequence[RankRecord]
    size: int
    origin: int  # by the calendar: nanoseconds since 1970
    length: int  # of the record, in nanoseconds
    several_clocks: bool = False  # of several hosts, put side by side by their first barrier
    left_out: Sequence[str] = field(default=())  # files of other jobs in the same folder

    def calls(self) -> Iterator[tuple[int, Event]]:
        """Yield every call, with its rank."""
        for record in self.ranks:
            for event in record.events:
                if event.kind == "call":
                    yield record.rank, event

    def members(self, group: int) -> list[int]:
        """Return the ranks of a group that were recorded, in their order there."""
        found = {
            record.groups[group][0]: record.rank for record in self.ranks if group in record.groups
        }
        return [found[place] for place in sorted(found)]
