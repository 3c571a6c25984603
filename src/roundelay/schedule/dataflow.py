"""The compiler's middle form: values, the nodes that make them, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field

from roundelay.schedule.program import Operand
from roundelay.schedule.schedule import Cell

__all__ = ["Node", "Value"]


@dataclass(eq=False, slots=True)
class Value:
    """One version of a cell: what a rank brings (step -1), or what a step of the schedule wrote."""

    cell: Cell
    step: int
    sources: list[Value] = field(default_factory=list)
    consumers: list[Value] = field(default_factory=list)
    complete: bool = False  # the fold that brings in the last contribution
    final: bool = False  # the contract asks for it
    pushed: bool = False  # written by the rank that sends it, not by the one that gets it
    node: Node | None = None  # that writes it to `place`
    place: Operand | None = None  # where it is read, but for an input by its own rank

    @property
    def level(self) -> int:
        """When the receiver makes it: writes of step t are level 2t + 1, staging for them 2t."""
        return 2 * self.step + 1

    def seen_from(self, rank: int) -> Operand | None:
        """Return where `rank` reads it; None while it has no place."""
        if self.step < 0 and rank == self.cell.rank:
            return Operand("in", *self.cell)
        return self.place

    def in_slot_of(self, rank: int) -> bool:
        """Tell whether it lies in one of the rank's slots."""
        place = self.place
        return place is not None and place.space == "slot" and place.rank == rank


@dataclass(eq=False, slots=True)
class Node:
    """One future `APPLY`: reads values, writes outputs and perhaps a slot."""

    rank: int
    level: int
    chunk: int
    reads: list[Value]
    complete: bool = False
    writes: list[Operand] = field(default_factory=list)
    slot: Value | None = None  # the value to put into a slot as well
    after: list[Node] = field(default_factory=list)  # that read what this overwrites
    emitted: bool = False
    post: int = 0  # the post of its rank that covers it

    def waits_for(self) -> set[Node]:
        """Return the nodes of other ranks that must be done before this one."""
        makers = [
            value.node
            for value in self.reads
            if value.node is not None and not (value.step < 0 and value.cell.rank == self.rank)
        ]
        return {node for node in (*makers, *self.after) if node.rank != self.rank}

    def operands(self) -> list[Operand]:
        """Return what it reads and writes in inputs and outputs, its own rank's and others'."""
        seen = (value.seen_from(self.rank) for value in self.reads)
        return [*(place for place in seen if place and place.space != "slot"), *self.writes]
