"""The meaning of a schedule, for all who read one: what each step writes, from what, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from roundelay.collectives import letter
from roundelay.schedule.expression import Algebra, Expression, ranks_in
from roundelay.schedule.schedule import Cell, Schedule, Transfer

__all__ = ["Failure", "Step", "Write", "held_at_start", "replay"]

Kind = Literal[
    "missing",
    "doubled",
    "stale",
    "overwritten",
    "unexpected contribution",
    "race",
    "deadlock",
    "malformed",
]


@dataclass(frozen=True, slots=True)
class Failure:
    """One way in which a schedule or a program breaks its contract, and where.

    As data, steps count from 0, as in the schedule; in words from 1, as in pictures.

    >>> print(Failure("missing", rank=2, chunk=0, step=3, detail="rank 1 has not sent it"))
    step 4, rank 2, chunk 0 (a): missing: rank 1 has not sent it
    """

    kind: Kind
    rank: int
    chunk: int
    step: int | None
    detail: str
    instruction: int | None = None  # of the rank's program, where a program fails
    name: str = ""  # of the chunk, where it is no letter

    def __str__(self) -> str:
        when = "at the end" if self.step is None else f"step {self.step + 1}"
        if self.instruction is not None:
            when = f"instruction {self.instruction}"
        name = f"chunk {self.chunk} ({self.name or letter(self.chunk)})"
        return f"{when}, rank {self.rank}, {name}: {self.kind}: {self.detail}"


class Write(NamedTuple):
    """A cell takes a new value: the fold of what `sources` held before the step, in this order."""

    cell: Cell
    sources: tuple[int, ...]
    value: Expression


class Step(NamedTuple):
    """Everything one step of a schedule does."""

    number: int
    writes: list[Write]
    failures: list[Failure]


def held_at_start(schedule: Schedule, algebra: Algebra) -> dict[Cell, Expression]:
    """Return what every cell holds before the first step."""
    return {cell: algebra.leaf(cell.rank) for cell in schedule.held_before()}


def replay(schedule: Schedule, algebra: Algebra | None = None) -> Iterator[Step]:
    """Yield what every step writes. Faulty steps are carried on with, so that they can be drawn."""
    algebra = algebra or Algebra()
    held = held_at_start(schedule, algebra)
    for number, transfers in enumerate(schedule.steps):
        into: dict[Cell, list[Transfer]] = {}
        for transfer in transfers:
            into.setdefault(Cell(transfer.dst, transfer.chunk), []).append(transfer)
        step = Step(number, [], [])
        for cell, arriving in into.items():
            write = _write(schedule, algebra, held, cell, arriving, step.failures)
            if write is not None:
                step.writes.append(write)
        for write in step.writes:
            held[write.cell] = write.value
        yield step


def _write(
    schedule: Schedule,
    algebra: Algebra,
    held: dict[Cell, Expression],
    cell: Cell,
    arriving: list[Transfer],
    failures: list[Failure],
) -> Write | None:
    """Return what one cell takes in one step, or None when nothing reaches it."""
    rank, chunk = cell
    step = arriving[0].step

    def fail(kind: Kind, at: int, detail: str) -> None:
        failures.append(Failure(kind, at, chunk, step, detail))

    copies = [transfer.src for transfer in arriving if transfer.op == "copy"]
    if copies and len(arriving) > 1:
        others = ", ".join(f"{t.op} from {t.src}" for t in arriving)
        fail("overwritten", rank, f"takes one copy or any number of reduces, but got {others}")

    operands: list[tuple[Expression, int]] = []
    for transfer in arriving[-1:] if copies else arriving:
        value = held.get(Cell(transfer.src, chunk))
        if value is None:
            fail("missing", transfer.src, f"sends to rank {rank} what it does not hold")
        else:
            operands.append((value, transfer.src))
    own = held.get(cell)
    if not copies and own is not None:
        operands.append((own, rank))
    if not operands:
        return None

    operands.sort(key=lambda operand: operand[0].low)
    if not schedule.collective.idempotent:
        seen = 0
        for value, src in operands:
            twice = seen & value.ranks
            if twice:
                names = ", ".join(map(str, ranks_in(twice)))
                whose = f"rank{'s' if twice.bit_count() > 1 else ''} {names}"
                fail("doubled", rank, f"the contribution of {whose} comes again from rank {src}")
            seen |= value.ranks
    return Write(
        cell,
        tuple(src for _, src in operands),
        algebra.fold([value for value, _ in operands]),
    )
