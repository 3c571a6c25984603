"""Proof that programs do what their schedule says, whatever the timing.

What is proved must be what runs, so nothing of the compiler is trusted or used. All programs run
symbolically, for one slice more than there are sets of slots where these are used again, and those
of private buffers also with their heads a slice ahead, as large messages have them. Every access is
checked against every other on the same memory by what its rank can know of the others' posts
(vector clocks): two accesses of which one writes, with no order between them, are a race.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, NoReturn

from roundelay.errors import ProofError
from roundelay.schedule.expression import Algebra, Expression
from roundelay.schedule.program import (
    LARGE,
    WINDOW,
    Apply,
    Instruction,
    Operand,
    Post,
    Programs,
    Space,
    Wait,
)
from roundelay.schedule.replay import Failure, Kind, held_at_start, replay
from roundelay.schedule.schedule import Cell

__all__ = ["prove_program"]

AFTERWARDS = 1 << 62  # no post ever covers what a caller does after the call


def prove_program(programs: Programs, *, also_in_place: bool = False, window: int = LARGE) -> None:
    """Raise `ProofError` naming rank and instruction unless the programs keep the contract.

    Private buffers are tried both apart and in place, since callers may pass either; others are
    where that is asked for. So many sets of slots as `window` says are used in turn: `LARGE` of
    large messages; of small ones `WINDOW`.

    >>> from roundelay.algorithms import algorithms
    >>> from roundelay.schedule import compile_schedule
    >>> prove_program(compile_schedule(algorithms.load("all_reduce_ring").schedule(4)))
    """
    reach = programs.reach
    private = not reach.input and not reach.output
    both = also_in_place or (private and programs.schedule.collective.in_place)
    slices = window + 1 if any(program.slots for program in programs.ranks) else 1
    runs = [(reach.in_place, slices, False)] + ([(True, 1, False)] if both else [])
    if private and slices > 1 and window != WINDOW:
        runs += [(in_place, slices, True) for in_place in {False, both}]
    for in_place, count, leads in runs:
        machine = _Machine(programs, in_place=in_place, slices=count, window=window, leads=leads)
        failures = machine.run()
        if failures:
            raise ProofError(f"The program of {programs.schedule.name} ({reach})", failures)


class Address(NamedTuple):
    """A piece of memory: `turn` is the slice for buffers, the number of its set for slots."""

    space: Space | Literal["buffer"]  # one buffer when in and out are the same
    rank: int
    at: int
    turn: int


@dataclass(slots=True)
class Memory:
    """What lies in a place, and who touched it last: by rank, with its flag at that time."""

    value: Expression | None = None
    chunk: int = 0  # of which chunk,
    turn: int = 0  # and of which slice
    writer: tuple[int, int] | None = None
    readers: dict[int, int] = field(default_factory=dict)


class _FaultError(Exception):
    """Stops the machine at the first failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class _Machine:
    def __init__(
        self, programs: Programs, *, in_place: bool, slices: int, window: int, leads: bool
    ) -> None:
        self.programs, self.schedule, self.reach = programs, programs.schedule, programs.reach
        self.in_place, self.slices, self.window = in_place, slices, window
        self.ahead = int(leads)  # slices by which the heads of programs are
        self.leads = [program.leads for program in programs.ranks]
        size = self.schedule.size
        self.algebra = Algebra()
        self.memory: dict[Address, Memory] = {}
        self.flags = [0] * size
        self.known = [[0] * size for _ in range(size)]
        self.posted: list[list[tuple[int, list[int]]]] = [[] for _ in range(size)]
        self.line = [0] * size
        self.due = dict(self.schedule.due_after())
        self.everyone = (1 << size) - 1
        # Buffers were last touched by their own rank's caller, before it began.
        held = held_at_start(self.schedule, self.algebra)
        for turn in range(self.slices):
            for cell, value in held.items():
                place = self.place(Operand("in", *cell), turn)
                self.memory[place] = Memory(value, cell.chunk, turn, (cell.rank, 0))
            for cell in self.due:
                place = self.place(Operand("out", *cell), turn)
                self.memory.setdefault(place, Memory(None, cell.chunk, turn, (cell.rank, 0)))

    def run(self) -> list[Failure]:
        ranks = {rank: self.walk(rank) for rank in range(self.schedule.size)}
        blocked: dict[int, Wait] = {}
        try:
            while ranks:
                progress = False
                for rank, walk in list(ranks.items()):
                    waiting = next(walk, None)
                    progress |= waiting is None or waiting is not blocked.get(rank)
                    if waiting is None:
                        del ranks[rank]
                    else:
                        blocked[rank] = waiting
                if not progress:
                    stuck = ", ".join(f"rank {rank} in {blocked[rank]}" for rank in ranks)
                    self.fail("deadlock", min(ranks), 0, f"nobody can go on: {stuck}")
            self.compare()
        except _FaultError as fault:
            return [fault.failure]
        return []

    def walk(self, rank: int) -> Iterator[Wait]:
        """Run one rank; yield the wait it stands at whenever it can't go on."""
        program, posts = self.programs.ranks[rank], self.programs.posts
        code = program.instructions
        head = program.head if self.ahead else len(code)
        for turn in range(self.slices + self.ahead):
            base = turn * posts
            # Who hears of all need not ask: the check below holds it to that.
            asks = turn < self.slices and (self.ahead or not program.hears_all)
            for first in self.before_reuse(rank, turn - self.window) if asks else ():
                yield from self.wait(rank, first)
            yield from self.part(rank, 0, code[:head], turn, base)
            if self.ahead and turn:
                yield from self.part(rank, head, code[head:], turn - 1, base)
            ended = turn >= self.ahead
            if ended and self.flags[rank] != base + posts:
                self.fail(
                    "malformed", rank, 0, f"ends at flag {self.flags[rank] - base}, not {posts}"
                )
            if ended and program.hears_all and min(self.known[rank]) <= base - self.ahead * posts:
                detail = "does not hear of every rank, and says that it does"
                self.fail("malformed", rank, 0, detail)
        self.leave(rank)

    def part(
        self, rank: int, start: int, code: Sequence[Instruction], turn: int, base: int
    ) -> Iterator[Wait]:
        """Run some instructions on a slice; past the end of the message only posts are made."""
        for number, line in enumerate(code, start):
            self.line[rank] = number
            if isinstance(line, Wait):
                before = self.ahead and line.post <= self.leads[line.rank]
                post = base + line.post - (self.programs.posts if before else 0)
                yield from self.wait(rank, Wait(line.rank, post))
                # Each post may have a place of its own: one that is passed over is never seen.
                if all(flag != post for flag, _ in self.posted[line.rank]):
                    self.fail("malformed", rank, 0, f"{line}: which that rank passes over")
            elif isinstance(line, Post):
                self.post(rank, base + line.post)
            elif turn < self.slices:
                self.apply(rank, line, turn)

    def before_reuse(self, rank: int, last: int) -> list[Wait]:
        """Return the waits before the slots of slice `last` are written again, as the core does.

        For small slots it waits for all; for large ones, of which there are few, for their readers.
        """
        if last < 0:
            return []
        program = self.programs.ranks[rank]
        end = (last + 1 + self.ahead) * self.programs.posts
        if self.window == WINDOW:
            return [Wait(other, end + 1) for other in range(self.schedule.size) if other != rank]
        ends = [self.programs.ranks[reader].posts_last for reader in program.readers]
        return [
            Wait(reader, end + (not ended))
            for reader, ended in zip(program.readers, ends, strict=True)
        ]

    def wait(self, rank: int, line: Wait) -> Iterator[Wait]:
        while self.flags[line.rank] < line.post:
            yield line
        # All it may conclude is what held at the first post that lets it go on.
        clock = next(clock for flag, clock in self.posted[line.rank] if flag >= line.post)
        self.known[rank] = list(map(max, self.known[rank], clock))

    def post(self, rank: int, flag: int) -> None:
        if flag <= self.flags[rank]:
            self.fail("malformed", rank, 0, f"posts {flag} after {self.flags[rank]}")
        self.flags[rank] = self.known[rank][rank] = flag
        self.posted[rank].append((flag, list(self.known[rank])))

    def apply(self, rank: int, line: Apply, turn: int) -> None:
        values = [self.read(rank, operand, line, turn) for operand in line.srcs]
        value = self.algebra.fold(values)
        complete = len(values) > 1 and value.ranks == self.everyone
        if complete != line.complete:
            self.fail("malformed", rank, line.chunk, f"{line} has complete={line.complete}")
        # What is copied onto itself is not touched.
        here = self.place(line.srcs[0], turn) if len(line.srcs) == 1 else None
        for operand in line.dsts:
            if self.place(operand, turn) != here:
                self.write(rank, operand, line, value, turn)

    def read(self, rank: int, operand: Operand, line: Apply, turn: int) -> Expression:
        if operand.rank != rank and not self.may_reach(operand):
            self.fail(
                "malformed", rank, line.chunk, f"{line} reads {operand}, which it can't reach"
            )
        memory = self.memory.get(self.place(operand, turn))
        if memory is None or memory.value is None:
            self.fail("missing", rank, line.chunk, f"{line} reads {operand}, which holds nothing")
        if (memory.chunk, memory.turn) != (line.chunk, turn):
            held = f"chunk {memory.chunk} of slice {memory.turn}"
            self.fail("stale", rank, line.chunk, f"{line} reads {held} in {operand}")
        self.require(rank, memory.writer, line, operand)
        memory.readers[rank] = self.flags[rank]
        return memory.value

    def write(self, rank: int, operand: Operand, line: Apply, value: Expression, turn: int) -> None:
        if operand.rank != rank and (operand.space == "slot" or not self.may_reach(operand)):
            self.fail(
                "malformed", rank, line.chunk, f"{line} writes {operand}, which is not its own"
            )
        cell = Cell(operand.rank, operand.at)
        slots = self.programs.ranks[rank].slots
        if (
            operand.space == "in"
            or (operand.space == "out" and cell not in self.due)
            or (operand.space == "slot" and not 0 <= operand.at < slots)
        ):
            self.fail("malformed", rank, line.chunk, f"{line} writes {operand}, which must stay")
        place = self.place(operand, turn)
        memory = self.memory.get(place)
        if memory is None:
            memory = self.memory[place] = Memory()
        self.require(rank, memory.writer, line, operand)
        for reader in memory.readers.items():
            self.require(rank, reader, line, operand)
        memory.value, memory.chunk, memory.turn = value, line.chunk, turn
        memory.writer, memory.readers = (rank, self.flags[rank]), {}

    def leave(self, rank: int) -> None:
        """Return from the call: its caller may use and overwrite both buffers."""
        for place, memory in self.memory.items():
            if place.rank == rank and place.space != "slot":
                for other in (memory.writer, *memory.readers.items()):
                    self.require(rank, other, None, Operand("out", rank, place.at))
                memory.writer = (rank, AFTERWARDS)

    def require(
        self, rank: int, other: tuple[int, int] | None, line: Apply | None, operand: Operand
    ) -> None:
        """Fail unless this rank knows that the other's access to the operand is over."""
        if other is None or other[0] == rank or self.known[rank][other[0]] > other[1]:
            return
        what = line or "the caller's next use"
        detail = f"nothing orders {what} after what rank {other[0]} does with {operand}"
        self.fail("race", rank, line.chunk if line else operand.at, detail)

    def compare(self) -> None:
        """Every output must be the very expression that the schedule was proved with."""
        held = held_at_start(self.schedule, self.algebra)
        for step in replay(self.schedule, self.algebra):
            held.update((write.cell, write.value) for write in step.writes)
        for turn in range(self.slices):
            for cell in self.due:
                memory = self.memory[self.place(Operand("out", *cell), turn)]
                if memory.value is not held[cell] or (memory.chunk, memory.turn) != (
                    cell.chunk,
                    turn,
                ):
                    self.line[cell.rank] = len(self.programs.ranks[cell.rank].instructions)
                    detail = f"OUT {cell.rank}[{cell.chunk}] is not what the schedule gives"
                    self.fail("missing", *cell, detail)

    def may_reach(self, operand: Operand) -> bool:
        return operand.space == "slot" or (
            self.reach.input if operand.space == "in" else self.reach.output
        )

    def place(self, operand: Operand, turn: int) -> Address:
        if operand.space == "slot":
            return Address("slot", operand.rank, operand.at, turn % self.window)
        space = "buffer" if self.in_place else operand.space
        return Address(space, operand.rank, operand.at, turn)

    def fail(self, kind: Kind, rank: int, chunk: int, detail: str) -> NoReturn:
        raise _FaultError(Failure(kind, rank, chunk, None, detail, instruction=self.line[rank]))
