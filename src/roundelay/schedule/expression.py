"""What a cell holds, symbolically: whose contributions, folded in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Algebra", "Expression", "Order", "ranks_in"]

#: How the additions of a result are ordered, from the strongest promise to the weakest.
Order = Literal["rank_order", "contiguous", "any"]

MANY_TERMS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """A contribution (no children), or a fold of several expressions from left to right."""

    ranks: int  # bit r is set when rank r's contribution is in it
    low: int
    high: int
    terms: int  # how many contributions, each counted as often as it is in it
    folds: int  # how many folds deep: how often a half-precision value is rounded
    ascending: bool  # contributions appear in rank order, however parenthesised
    left: bool  # ascending, and parenthesised as (((0 + 1) + 2) + 3)
    children: tuple[Expression, ...] = field(repr=False)

    @property
    def order(self) -> Order:
        """Classify the order of addition."""
        return "rank_order" if self.left else "contiguous" if self.ascending else "any"

    def leaves(self) -> list[int]:
        """List the contributing ranks in the order they are folded.

        A faulty schedule can double the terms in every step: beyond any use of an order, each
        rank is listed once.
        """
        if self.terms > MANY_TERMS:
            return ranks_in(self.ranks)
        leaves: list[int] = []
        stack = [self]
        while stack:
            expression = stack.pop()
            if expression.children:
                stack.extend(reversed(expression.children))
            else:
                leaves.append(expression.low)
        return leaves


def ranks_in(mask: int) -> list[int]:
    """List the ranks whose bits are set.

    >>> ranks_in(0b1101)
    [0, 2, 3]
    """
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


class Algebra:
    """Makes expressions so that equal ones are the same object; compare them with `is`."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Expression] = {}
        self._leaves: dict[int, Expression] = {}

    def leaf(self, rank: int) -> Expression:
        """Return what `rank` itself brings."""
        known = self._leaves.get(rank)
        if known is None:
            known = self._leaves[rank] = Expression(
                1 << rank, rank, rank, terms=1, folds=0, ascending=True, left=True, children=()
            )
        return known

    def fold(self, operands: Sequence[Expression]) -> Expression:
        """Fold operands from left to right; one operand alone stays what it is."""
        if len(operands) == 1:
            return operands[0]
        key = tuple(map(id, operands))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _fold(tuple(operands))
        return known


def _fold(operands: tuple[Expression, ...]) -> Expression:
    ranks, high, folds = 0, -1, 0
    ascending = True
    for operand in operands:
        ascending = ascending and operand.ascending and high < operand.low
        ranks |= operand.ranks
        high = max(high, operand.high)
        folds = max(folds, operand.folds)
    return Expression(
        ranks=ranks,
        low=min(operand.low for operand in operands),
        high=high,
        terms=sum(operand.terms for operand in operands),
        folds=folds + 1,
        ascending=ascending,
        left=ascending and operands[0].left and not any(o.children for o in operands[1:]),
        children=operands,
    )
