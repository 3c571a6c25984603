"""Who has which tokens, and which block of the square of attention each rank computes when.

Pure data, without torch: attention runs by it, pictures and tests read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundelay.errors import InvalidArgumentError, UnknownNameError, rank_count
from roundelay.schedule.layout import split

__all__ = ["LAYOUTS", "METHODS", "Block", "RingPlan", "check_layout", "spans_of", "spans_so_long"]

#: How a sequence is divided: in one piece for each rank, or an early and a late one.
LAYOUTS = ("contiguous", "zigzag")
#: How queries meet the keys of other ranks: these travel around, or heads are exchanged for tokens.
METHODS = ("ring", "ulysses")

Span = tuple[int, int]  # from this token up to that one


def check_layout(layout: object) -> str:
    """Return the layout; refuse one that is not there."""
    if layout not in LAYOUTS:
        raise UnknownNameError("layouts of a sequence", str(layout), LAYOUTS)
    return str(layout)


def spans_of(length: int, size: int, layout: str = "contiguous") -> list[tuple[Span, ...]]:
    """Return which tokens of a sequence each rank has.

    `zigzag` cuts twice as many pieces as there are ranks and gives each rank one from the front and
    one from the back, so that all have as many tokens to look back at.

    >>> spans_of(7, 2)
    [((0, 4),), ((4, 7),)]
    >>> spans_of(8, 2, "zigzag")
    [((0, 2), (6, 8)), ((2, 4), (4, 6))]
    """
    if layout == "contiguous":
        return [((piece.start, piece.stop),) for piece in split(length, size)]
    pieces = [(piece.start, piece.stop) for piece in split(length, 2 * size)]
    return [(pieces[rank], pieces[2 * size - 1 - rank]) for rank in range(size)]


def spans_so_long(lengths: Sequence[int], layout: str) -> list[tuple[Span, ...]]:
    """Return which tokens each rank has, by how many it has; refuse what is no such layout.

    Contiguous pieces may have any lengths. A zigzag has those of `spans_of`: nothing else says
    where its first pieces end.

    >>> spans_so_long([1, 3, 0], "contiguous")
    [((0, 1),), ((1, 4),), ((4, 4),)]
    """
    if layout == "contiguous":
        starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
        return [((start, start + n),) for start, n in zip(starts, lengths, strict=True)]
    spans = spans_of(sum(lengths), len(lengths), layout)
    expected = [sum(stop - start for start, stop in each) for each in spans]
    if expected != list(lengths):
        raise InvalidArgumentError(
            f"A zigzag of {sum(lengths)} tokens on {rank_count(len(lengths))} has {expected} on "
            f"each, but they have {list(lengths)}. Divide the sequence with rd.shard_sequence(…, "
            f"layout='zigzag')."
        )
    return spans


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of a rank that meet keys it has at the moment, as places among those of each."""

    queries: Span
    keys: Span
    causal: bool  # each query sees the keys up to its own place, so about half of them

    @property
    def pairs(self) -> int:
        """How many queries meet keys: what the block costs."""
        rows, columns = (stop - start for start, stop in (self.queries, self.keys))
        return rows * (rows + 1) // 2 if self.causal else rows * columns


@dataclass(frozen=True)
class RingPlan:
    """Ring attention step by step: in step t, rank r has the keys of rank r - t.

    >>> plan = RingPlan.even(8, 2, "zigzag", causal=True)
    >>> [plan.block(0, step) for step in range(2)]  # doctest: +NORMALIZE_WHITESPACE
    [Block(queries=(0, 4), keys=(0, 4), causal=True),
     Block(queries=(2, 4), keys=(0, 4), causal=False)]
    >>> [plan.work(rank) for rank in range(2)]
    [18, 18]
    """

    spans: tuple[tuple[Span, ...], ...]  # the tokens of every rank
    causal: bool

    @classmethod
    def even(cls, length: int, size: int, layout: str, *, causal: bool) -> RingPlan:
        """Plan for a sequence that `rd.shard_sequence` divides."""
        return cls(tuple(spans_of(length, size, layout)), causal)

    @property
    def size(self) -> int:
        """How many ranks there are, and steps."""
        return len(self.spans)

    def length(self, rank: int) -> int:
        """Return how many tokens a rank has."""
        return sum(stop - start for start, stop in self.spans[rank])

    def source(self, rank: int, step: int) -> int:
        """Return whose keys and values a rank has in a step."""
        return (rank - step) % self.size

    def block(self, rank: int, step: int) -> Block | None:
        """Return what a rank computes in a step; None where it has nothing to do."""
        source = self.source(rank, step)
        queries, keys = (0, self.length(rank)), (0, self.length(source))
        if self.causal and rank != source:
            seen = self._seen(rank, source)
            if seen is None:
                return None
            queries, keys = seen
        if queries[0] == queries[1] or keys[0] == keys[1]:
            return None
        return Block(queries, keys, self.causal and rank == source)

    def _seen(self, rank: int, source: int) -> tuple[Span, Span] | None:
        """Return which queries of one rank see which keys of another, where none sees a part.

        Of two ranks in a zigzag, one has the pieces between those of the other.
        """
        queries, keys = (0, self.length(rank)), (0, self.length(source))
        first = self.spans[rank][0][1] - self.spans[rank][0][0]
        early = self.spans[source][0][1] - self.spans[source][0][0]
        if rank > source:
            return queries, (0, early)
        return ((first, queries[1]), keys) if len(self.spans[rank]) > 1 else None

    def work(self, rank: int) -> int:
        """Return how many pairs of a query and a key a rank computes in all steps."""
        blocks = (self.block(rank, step) for step in range(self.size))
        return sum(block.pairs for block in blocks if block is not None)

    def slowest(self) -> int:
        """Return the pairs that the ranks wait for: of each step, those of the busiest."""
        steps = [[self.block(rank, step) for rank in range(self.size)] for step in range(self.size)]
        return sum(max(block.pairs if block else 0 for block in blocks) for blocks in steps)
