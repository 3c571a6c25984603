"""The programs of one communicator: made when first needed, kept for the next call.

A few ranks compile each for itself. Of many, the first to need a program compiles it for all and
puts it where all can read it, so that the work is done once.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from roundelay import _core
from roundelay.collectives import collectives
from roundelay.engines._call import AXIS, COLLECTIVES, CollectiveCall
from roundelay.engines._native.encode import encoded, idle, view
from roundelay.engines._selector import Candidates, Selector
from roundelay.live.call_words import word_of
from roundelay.reductions import CODES, OPS
from roundelay.schedule import Reach, Schedule, compile_schedule

PRIVATE = Reach()
#: What is reached into where these buffers of all ranks lie in the arena. Not those of scans: a
#: result in place of its input would overwrite what later ranks still read.
IN_ARENA = {
    "all_reduce": Reach(input=True, output=True, in_place=True),
    "reduce_scatter": Reach(input=True),
    "reduce": Reach(input=True),
    "all_gather": Reach(input=True),
    "gather": Reach(input=True),
    "broadcast": Reach(input=True),
    "scatter": Reach(input=True),
    "all_to_all": Reach(input=True),
}
#: What is reached into where ranks can read one another's private memory. Callers may still pass
#: one buffer for input and output, and programs are proved for both.
READABLE = Reach(input=True)
#: From here on, ranks first look whether all buffers lie in the arena.
AGREE_FROM = 32 * 1024
EVER = 1 << 62

#: Whose output (1), input (2) or both (3) have blocks of all ranks; of others, shapes are alike.
SHAPES = {"all_gather": 1, "gather": 1, "scatter": 2, "reduce_scatter": 2, "all_to_all": 3}

#: Up to so many ranks, compiling costs each less than to wait for another.
ALONE_RANKS = 8
PATIENCE_S = 30.0  # for a rank that compiles for all; then others do it for themselves

#: Bytes; the programs, and the number of the usual algorithm; both again for what is rounded once.
NativeClass = tuple[int, _core.Ways | None, int, _core.Ways | None, int]


class ProgramCache:
    """Gives the native core what it needs to run a call."""

    def __init__(self, rank: int, selector: Selector, shelf: _core.Shelf) -> None:
        self.rank, self.size, self._selector = rank, selector.size, selector
        self._shelf = shelf
        self._known: dict[tuple[str, int, Reach], _core.Program] = {}
        self._ways: dict[tuple[Candidates, int, bool], _core.Ways] = {}

    @property
    def made(self) -> int:
        """Count the sets of programs that are there."""
        return len(self._ways)

    def arguments(self, call: CollectiveCall, algorithm: str | None) -> tuple[Any, ...]:
        """Return the arguments of the native call, in its order."""
        candidates = self._selector.candidates(call, algorithm)
        reach = self._reach(call.collective, call.nbytes)
        if call.wide:  # what others reach is rounded, and so lies in slots
            candidates, reach = Candidates(candidates.by_slots), None
        return (
            self.ways(candidates, call.root, reach),
            None if call.input is None else view(call.input),
            None if call.output is None else view(call.output),
            COLLECTIVES[call.collective],
            self._selector.number(candidates.by_slots[0]),
            word_of(call),
            CODES[call.dtype],
            OPS[call.op],
            call.item,
            call.count,
            list(call.counts),
        )

    def ways(self, candidates: Candidates, root: int, reach: Reach | None) -> _core.Ways:
        """Return the programs of algorithms, of the usual one also that for the arena, if any."""
        key = candidates, root, reach is not None
        found = self._ways.get(key)
        if found is None:
            usual = candidates.by_slots[0]
            made = _core.Ways(
                [self.program(name, root) for name in candidates.by_slots],
                [self.program(name, root, READABLE) for name in candidates.by_reading],
                None if reach is None else self.program(usual, root, reach),
            )
            # Of two threads that make it at once, one keeps it: the native core must not lose it.
            found = self._ways.setdefault(key, made)
        return found

    def program(self, name: str, root: int, reach: Reach = PRIVATE) -> _core.Program:
        """Return the program of an algorithm, compiled once."""
        key = (name, root, reach)
        found = self._known.get(key)
        if found is None:
            made = _core.Program(self._compiled(name, root, reach), self._selector.number(name))
            found = self._known.setdefault(key, made)
        return found

    def _compiled(self, name: str, root: int, reach: Reach) -> bytes:
        if self.size <= ALONE_RANKS:
            return kept(self._selector.schedule(name, root), reach)[self.rank]
        text = f"{name} {self.size} {root} {reach}"
        key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) | 1
        deadline = time.monotonic() + PATIENCE_S
        try:
            while (found := self._shelf.take(key, self.rank)) is False:
                if time.monotonic() > deadline:
                    break
        except _core.Broken:
            return idle(self.rank)  # nothing runs any more, but the call still shows what it was
        if isinstance(found, bytes):
            return found
        try:
            with _no_collections():
                parts = compiled(self._selector.schedule(name, root), reach)
            with contextlib.suppress(_core.OutOfMemory):  # the others make it too, then
                self._shelf.put(key, parts)
        finally:
            self._shelf.drop(key)  # if it could not be made, another rank may try
        return parts[self.rank]

    def _reach(self, collective: str, nbytes: int) -> Reach | None:
        """Return what can be reached into where the buffers of all ranks lie in the arena."""
        return IN_ARENA.get(collective) if self.size > 1 and nbytes >= AGREE_FROM else None

    def plain_calls(
        self, collective: str, root: int, word: int, ways: _core.Ways
    ) -> tuple[Any, ...]:
        """Return what the native core must know to run plain calls by itself, in its order."""
        blocks = ways.in_here, ways.out_here, ways.most
        shapes, along_axis = SHAPES.get(collective, 0), bool(word & AXIS)
        reduces = collectives.load(collective).reduces
        number, classes = COLLECTIVES[collective], self.size_classes(collective, root)
        return (number, word, shapes, along_axis, reduces, *blocks, classes)

    def size_classes(self, collective: str, root: int) -> list[NativeClass]:
        """Return the ways of plain calls by size; those that were asked for need no Python."""
        found: list[NativeClass] = []
        below = 0
        for up_to, *both in self._selector.size_classes(collective):
            # Cut where the arena begins to count, so that each class has one set of ways.
            most = int(min(up_to, EVER))
            for end in (AGREE_FROM - 1, most) if below < AGREE_FROM <= most else (most,):
                reaches = self._reach(collective, end) is not None
                one, other = (self._made(candidates, root, reaches=reaches) for candidates in both)
                found.append((end, *one, *other))
            below = most + 1
        return found

    def _made(
        self, candidates: Candidates, root: int, *, reaches: bool
    ) -> tuple[_core.Ways | None, int]:
        """Return the ways, which the long way makes if they are missing, and the usual's number."""
        number = self._selector.number(candidates.by_slots[0])
        return self._ways.get((candidates, root, reaches)), number


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Look for no garbage meanwhile: all those objects are alive, and each would be visited."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def compiled(schedule: Schedule, reach: Reach) -> list[bytes]:
    """Return every rank's program, for the native core."""
    return encoded(compile_schedule(schedule, reach), range(schedule.size))


@lru_cache(maxsize=128)
def kept(schedule: Schedule, reach: Reach) -> list[bytes]:
    """Return the same once more for ranks that are threads, for groups, and for forks."""
    return compiled(schedule, reach)
