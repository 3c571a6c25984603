"""Proof that a schedule keeps its contract: run it symbolically and compare, cell by cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from roundelay.errors import ProofError
from roundelay.schedule.expression import Algebra, Expression, Order
from roundelay.schedule.replay import Failure, Write, held_at_start, replay
from roundelay.schedule.schedule import Cell, Schedule

__all__ = ["Proof", "find_failures", "prove"]

ORDERS: tuple[Order, ...] = get_args(Order)


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
    """List every failure of a schedule; empty when it is proved."""
    return _run(schedule)[0]


def _run(schedule: Schedule) -> tuple[list[Failure], list[Expression]]:
    algebra = Algebra()
    held = held_at_start(schedule, algebra)
    failures: list[Failure] = []
    for step in replay(schedule, algebra):
        failures += step.failures
        for write in step.writes:
            held[write.cell] = write.value

    finals: list[Expression] = []
    histories: dict[int, list[tuple[int, Write]]] | None = None
    for cell, due in schedule.due_after():
        value = held.get(cell)
        if value is not None and value.ranks == sum(1 << rank for rank in due):
            finals.append(value)
            continue
        histories = histories if histories is not None else _histories(schedule)
        history = histories.get(cell.chunk, [])
        failures.append(_diagnose(cell, due, value, history))
    return failures, finals


def _histories(schedule: Schedule) -> dict[int, list[tuple[int, Write]]]:
    """Return every write of every chunk, in order, with its step."""
    found: dict[int, list[tuple[int, Write]]] = {}
    for step in replay(schedule):
        for write in step.writes:
            found.setdefault(write.cell.chunk, []).append((step.number, write))
    return found


def _diagnose(
    cell: Cell, due: frozenset[int], value: Expression | None, history: list[tuple[int, Write]]
) -> Failure:
    """Say why `cell` does not hold what is due: the likeliest single cause."""
    rank, chunk = cell
    writes = [(step, write) for step, write in history if write.cell == cell]
    last = writes[-1][0] if writes else None
    if value is None:
        return Failure("missing", rank, chunk, None, f"holds nothing, needs {_sum(due)}")

    has = frozenset(value.leaves())
    got = f"holds {_sum(has)}, needs {_sum(due)}"
    if has - due:
        return Failure("foreign", rank, chunk, last, f"{got}: {_sum(has - due)} does not belong")

    lacking = due - has
    best = max(
        (len(lacking & frozenset(write.value.leaves())) for _, write in writes[:-1]), default=0
    )
    if best:
        return Failure("overwritten", rank, chunk, last, f"{got}; this step overwrote the rest")
    if writes and len(writes[-1][1].sources) == 1:
        (src,) = writes[-1][1].sources
        for step, write in history:
            if write.cell.rank == src and step >= writes[-1][0]:
                later = frozenset(write.value.leaves())
                if lacking & later:
                    detail = f"{got}; rank {src} sent it too early: it has {_sum(later)}"
                    return Failure("stale", rank, chunk, last, f"{detail} after step {step}")
    return Failure("missing", rank, chunk, None, got)


def _sum(ranks: frozenset[int]) -> str:
    shown = [str(rank) for rank in sorted(ranks)]
    if len(shown) > 8:
        shown[4:-3] = ["…"]
    return "ranks " + "+".join(shown) if len(ranks) != 1 else f"rank {shown[0]}"
