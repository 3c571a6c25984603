"""Calls over plain messages: a rank walks the schedule, sends what others need, folds what comes.

An engine whose library lacks a collective, a reduction or a dtype runs the call this way, and so
has all of them. Folds are those of the native core, so results are the reference's to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from roundelay import _core
from roundelay.engines._call import CollectiveCall, Request
from roundelay.engines._inputs import cut_out
from roundelay.reductions import Array
from roundelay.schedule import Layout, Schedule, Write, replay

#: Folds operands from left to right; told whether the result holds everybody's contribution, and
#: whether it may come into the memory of one of them.
Fold = Callable[[Sequence[Array], bool, Array | None], Array]
#: Returns memory for so many elements of a dtype, until the walk is over.
Room = Callable[[int, np.dtype[Any]], Array]

LINE = 64  # bytes; what is received begins on one
MOST_KEPT = 64 << 20  # bytes that the next walk finds where they were, already paged in


NOTHING = np.empty(0, np.uint8)


class PostBytes(Protocol):
    """Sends flat bytes to a rank, or receives as many from it, without waiting."""

    def __call__(self, data: Array, other: int, *, sends: bool) -> Request:
        """Begin. Messages between two ranks keep their order, and never meet those of users."""


class RankWrite(NamedTuple):
    """A chunk takes a new value: the fold of what these ranks held of it."""

    chunk: int
    sources: tuple[int, ...]
    complete: bool  # it now holds everybody's contribution


class RankStep(NamedTuple):
    """What one rank does in one step."""

    sends: tuple[tuple[int, int], ...]  # which chunk to whom
    writes: tuple[RankWrite, ...]


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """One rank's way through a schedule."""

    schedule: Schedule
    rank: int
    rank_steps: tuple[RankStep, ...]
    due: tuple[int, ...]  # the chunks of the rank's output

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> RankSchedule:
        """Read a rank's part off the schedule, in the order that its partners read theirs."""
        everyone = (1 << schedule.size) - 1
        rank_steps = []
        for step in replay(schedule):
            sends = [
                (write.cell.chunk, write.cell.rank)
                for write in step.writes
                if write.cell.rank != rank and rank in write.sources
            ]
            writes = [_write(write, everyone) for write in step.writes if write.cell.rank == rank]
            if sends or writes:
                rank_steps.append(RankStep(tuple(sends), tuple(writes)))
        due = sorted(cell.chunk for cell, _ in schedule.due_after() if cell.rank == rank)
        return cls(schedule, rank, tuple(rank_steps), tuple(due))

    def steps(
        self,
        given: Array | None,
        dtype: np.dtype[Any],
        counts: Sequence[int],
        fold: Fold,
        post: PostBytes,
        room: Room,
        output: Array | None = None,
    ) -> Generator[list[Request], None, list[Array]]:
        """Yield what must be done before it goes on; return the chunks of the rank's output.

        What was given is only read, and belongs to the walk until its end. What is due comes into
        the output at once, where one is given; that may be the input, if chunks lie alike in both.
        """
        brought = np.empty(0, dtype) if given is None else given
        cells = dict(cut_out(self.schedule, self.rank, brought, counts))
        lengths = Layout(self.schedule, tuple(counts)).chunk_lengths()
        places = {} if output is None else dict(self._places(output, lengths))
        for step in self.rank_steps:
            leaving = {chunk for chunk, _ in step.sends}
            arriving = {}
            for chunk, sources, _ in step.writes:
                at_once = len(sources) == 1 and chunk in places and chunk not in leaving
                for src in sources:
                    if src != self.rank:
                        arriving[chunk, src] = (
                            places[chunk] if at_once else room(lengths[chunk], dtype)
                        )
            # Receives first: a message that is expected need not be kept anywhere on its way.
            requests = [
                post(data.view(np.uint8), src, sends=False)
                for (_, src), data in arriving.items()
                if data.size
            ]
            requests += [
                post(cells[chunk].view(np.uint8), dst, sends=True)
                for chunk, dst in step.sends
                if lengths[chunk]
            ]
            yield requests
            write = {}
            for chunk, sources, complete in step.writes:
                came = [arriving[chunk, src] for src in sources if src != self.rank]
                operands = [
                    cells[chunk] if src == self.rank else arriving[chunk, src] for src in sources
                ]
                if len(operands) > 1:
                    operands[0] = fold(operands, complete, places.get(chunk, came[0]))
                write[chunk] = operands[0]
            cells.update(write)
        return [cells[chunk] for chunk in self.due]

    def _places(self, output: Array, lengths: Sequence[int]) -> Iterator[tuple[int, Array]]:
        start = 0
        for chunk in self.due:
            yield chunk, output[start : start + lengths[chunk]]
            start += lengths[chunk]


class OverMessages:
    """Runs the calls of one rank over messages, one after the other."""

    def __init__(self, rank: int, post: PostBytes) -> None:
        self._rank, self._post = rank, post
        self._known: dict[Schedule, RankSchedule] = {}
        self._kept: list[Array] = []  # what walks that are over have let go of

    def run(self, call: CollectiveCall, schedule: Schedule, fold: Fold | None = None) -> None:
        """Walk the schedule with the call's input, and write its output."""
        for requests in self.steps(call, schedule, fold):
            for request in requests:
                request.wait()

    def steps(
        self, call: CollectiveCall, schedule: Schedule, fold: Fold | None = None
    ) -> Generator[list[Request], None, None]:
        """Yield what must be done before it goes on, for engines that do other things meanwhile."""
        ranked = self._known.get(schedule)
        if ranked is None:
            ranked = self._known[schedule] = RankSchedule.of(schedule, self._rank)
        blocks = schedule.collective.blocks(schedule.size)
        fold = fold or native_fold(call.op, call.dtype, schedule.size)
        if schedule.collective.idempotent:
            # Nothing is brought, but somebody must be heard of: one byte for each block.
            nothing = np.zeros(blocks, np.uint8)
            yield from ranked.steps(
                nothing, nothing.dtype, [1] * blocks, fold, self._post, np.empty
            )
            return
        given = None if call.input is None else call.input.reshape(-1)
        output = None if call.output is None else call.output.reshape(-1)
        array = given if given is not None else output
        dtype = np.dtype(f"V{call.item}") if array is None else array.dtype
        counts = list(call.counts) or [call.count] * blocks
        memory = Arrivals(self._kept.pop() if self._kept else NOTHING)
        at_once = output if _free(call, given, output) else None
        parts = yield from ranked.steps(
            given, dtype, counts, fold, self._post, memory.room, at_once
        )
        start = 0
        if output is not None:
            for part in parts:
                place = output[start : start + len(part)]
                if place.ctypes.data != part.ctypes.data:
                    place[:] = part
                start += len(part)
        self._kept += memory.left()


def _free(call: CollectiveCall, given: Array | None, output: Array | None) -> bool:
    """Tell whether the output holds nothing that others may still need, but in its own place."""
    if given is None or output is None or not np.may_share_memory(given, output):
        return True
    alike = call.collective in ("all_reduce", "reduce")
    return alike and (given.ctypes.data, given.size) == (output.ctypes.data, output.size)


class Arrivals:
    """Memory for what comes during one walk: what the last walk had, as far as that goes."""

    def __init__(self, kept: Array) -> None:
        self._kept, self._used = kept, 0

    def room(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return memory for so many elements, whose contents are whatever they are."""
        start, nbytes = self._used, count * dtype.itemsize
        self._used += -(-nbytes // LINE) * LINE
        if self._used > self._kept.size:
            return np.empty(count, dtype)
        return self._kept[start : start + nbytes].view(dtype)

    def left(self) -> list[Array]:
        """Return what the next walk may have: as much as this one needed, if that is not much."""
        if self._used > MOST_KEPT:
            return []
        return [self._kept if self._used <= self._kept.size else np.empty(self._used, np.uint8)]


def _write(write: Write, everyone: int) -> RankWrite:
    complete = len(write.sources) > 1 and write.value.ranks == everyone
    return RankWrite(write.cell.chunk, write.sources, complete)


def native_fold(op: str, dtype: str, size: int) -> Fold:
    """Return the native fold for `size` ranks; bfloat16 and pairs are bytes of known meaning."""

    def fold(
        operands: Sequence[Array],
        complete: bool,  # noqa: FBT001 - a fold's form
        into: Array | None = None,
    ) -> Array:
        result = np.empty_like(operands[0]) if into is None else into
        divide_by = size if complete and op == "avg" else 0
        if result.size:
            sources = [operand.view(np.uint8) for operand in operands]
            _core.fold(op, dtype, [result.view(np.uint8)], sources, divide_by)
        return result

    return fold
