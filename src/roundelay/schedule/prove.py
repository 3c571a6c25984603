"""Proof that a schedule keeps its contract: run it symbolically and compare, cell by cell."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import or_
from typing import get_args

from roundelay.errors import ProofError
from roundelay.schedule.expression import Algebra, Expression, Order, ranks_in
from roundelay.schedule.replay import Failure, Write, held_at_start, replay
from roundelay.schedule.schedule import Cell, Schedule

__all__ = ["Proof", "find_failures", "prove"]

ORDERS: tuple[Order, ...] = get_args(Order)
#: A schedule that fails this often is not read to its end for more.
ENOUGH = 1000
#: Sums of more ranks are shown with their middle left out.
MANY = 8


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a schedule that keeps its contract.

    `order` is how the result is added up: `rank_order` (a left fold 0 … N-1), `contiguous` (fit
    for non-commutative reductions) or `any`. `folds` says how many folds deep: with 1, a
    half-precision result is rounded once.
    """

    order: Order
    folds: int


def prove(schedule: Schedule) -> Proof:
    """Return the proof, or raise `ProofError` naming rank, chunk and step of every failure.

    >>> from roundelay.algorithms import algorithms
    >>> prove(algorithms.load("all_reduce_two_shot").schedule(4))
    Proof(order='rank_order', folds=1)
    """
    failures, finals = _run(schedule)
    if failures:
        raise ProofError(f"{schedule.name} ({schedule.collective.name})", failures)
    return Proof(
        order=max((value.order for value in finals), key=ORDERS.index, default="rank_order"),
        folds=max((value.folds for value in finals), default=0),
    )


def find_failures(schedule: Schedule) -> list[Failure]:
    """List the failures of a schedule, the first thousand at most; empty when it is proved."""
    return _run(schedule)[0]


def _run(schedule: Schedule) -> tuple[list[Failure], list[Expression]]:
    algebra = Algebra()
    held = held_at_start(schedule, algebra)
    failures: list[Failure] = []
    for step in replay(schedule, algebra):
        failures += step.failures[: ENOUGH - len(failures)]
        for write in step.writes:
            held[write.cell] = write.value

    finals: list[Expression] = []
    history: _History | None = None
    for cell, due in schedule.due_after():
        value = held.get(cell)
        wanted = _mask(due)
        if value is not None and value.ranks == wanted:
            finals.append(value)
            continue
        if len(failures) >= ENOUGH:
            break
        history = history or _History(schedule)
        failures.append(history.diagnose(cell, wanted, value))
    if schedule.collective.named is not None:
        failures = [replace(each, name=schedule.chunk_name(each.chunk)) for each in failures]
    return failures, finals


class _History:
    """Every write of every cell: what it takes to say why a cell does not hold what is due.

    Contributions are compared as bit masks. A faulty schedule can count a contribution again and
    again, so its expressions may have far more leaves than anyone could list.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._at_start = set(schedule.held_before())
        self._writes: dict[Cell, list[tuple[int, Write]]] = {}
        for step in replay(schedule):
            for write in step.writes:
                self._writes.setdefault(write.cell, []).append((step.number, write))
        self._later: dict[Cell, list[int]] = {}

    def diagnose(self, cell: Cell, due: int, value: Expression | None) -> Failure:
        """Say why `cell` does not hold what is due: the likeliest single cause."""
        rank, chunk = cell
        if value is None:
            return Failure("missing", rank, chunk, None, f"holds nothing, needs {_sum(due)}")
        writes = self._writes.get(cell, [])
        got = f"holds {_sum(value.ranks)}, needs {_sum(due)}"
        extra = value.ranks & ~due
        if extra:
            first = next((step for step, write in writes if write.value.ranks & extra), None)
            return Failure(
                "unexpected contribution",
                rank,
                chunk,
                first,
                f"{got}: {_sum(extra)} does not belong",
            )
        lacking = due & ~value.ranks
        lost = self._lost(cell, lacking)
        if lost is not None:
            return Failure("overwritten", rank, chunk, lost, f"{got}; this step overwrote the rest")
        if writes and len(writes[-1][1].sources) == 1:
            step, write = writes[-1]
            (src,) = write.sources
            later = self._comes_later(Cell(src, chunk), step) & lacking
            if later:
                detail = f"{got}; rank {src} sent it too early, before it had {_sum(later)}"
                return Failure("stale", rank, chunk, step, detail)
        return Failure("missing", rank, chunk, None, got)

    def _lost(self, cell: Cell, lacking: int) -> int | None:
        """Return the last step that took something away that is lacking at the end."""
        had = 1 << cell.rank & lacking if cell in self._at_start else 0
        last = None
        for step, write in self._writes.get(cell, []):
            has = write.value.ranks & lacking
            if had & ~has:
                last = step
            had = has
        return last

    def _comes_later(self, cell: Cell, step: int) -> int:
        """Return the contributions that `cell` holds at any time after `step` has begun."""
        writes = self._writes.get(cell, [])
        if cell not in self._later:
            # From the last write back, so that many questions about one cell cost one walk.
            reversed_masks = (write.value.ranks for _, write in reversed(writes))
            self._later[cell] = list(accumulate(reversed_masks, or_))[::-1]
        index = bisect_left(writes, step, key=lambda entry: entry[0])
        return self._later[cell][index] if index < len(writes) else 0


# Most cells are due the same sum: a schedule may have millions, of a thousand ranks each.
@lru_cache(maxsize=1024)
def _mask(ranks: frozenset[int]) -> int:
    return sum(1 << rank for rank in ranks)


@lru_cache(maxsize=1024)
def _sum(mask: int) -> str:
    shown = [str(rank) for rank in ranks_in(mask)]
    word = "rank " if len(shown) == 1 else "ranks "
    if len(shown) > MANY:
        shown[4:-3] = ["…"]
    return word + "+".join(shown)
