"""Parameters one after the other in one long row, of which every rank owns an equal part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roundelay.training._buckets import BucketPlace, divide


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements of one parameter that one rank owns."""

    index: int  # of the parameter
    start: int  # in the flattened parameter
    stop: int
    at: int  # in the rank's part

    @property
    def inside(self) -> slice:
        """Where it lies in the rank's part."""
        return slice(self.at, self.at + self.stop - self.start)


class FlatLayout:
    """Where parameters lie in a row that is padded until it divides by the number of ranks.

    >>> layout = FlatLayout([0, 1], [(3,), (2, 2)], size=2)
    >>> layout.part, layout.padded
    (4, 8)
    >>> list(layout.pieces(0))
    [Piece(index=0, start=0, stop=3, at=0), Piece(index=1, start=0, stop=1, at=3)]
    >>> list(layout.pieces(1))
    [Piece(index=1, start=1, stop=4, at=0)]

    With `cut=False` no parameter is cut: each rank owns some of them whole, and as many elements
    of padding as the fullest rank has more.

    >>> layout = FlatLayout([0, 1, 2], [(3,), (2, 2), (2,)], size=2, cut=False)
    >>> layout.part, list(layout.pieces(0)), layout.gaps
    (5, [Piece(index=1, start=0, stop=4, at=0)], [slice(4, 5, None)])
    >>> list(layout.pieces(1))
    [Piece(index=0, start=0, stop=3, at=0), Piece(index=2, start=0, stop=2, at=3)]
    """

    def __init__(
        self,
        indices: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        *,
        size: int,
        cut: bool = True,
    ) -> None:
        self.size = size
        self.places: list[BucketPlace] = []
        lengths = [math.prod(shape) for shape in shapes]
        self.numel = sum(lengths)
        shares = [range(len(lengths))] if cut else divide(lengths, size)
        fullest = max(sum(lengths[at] for at in share) for share in shares)
        self.part = -(-fullest // size) if cut else fullest
        self.padded = self.part * size
        #: Elements that are nobody's.
        self.gaps: list[slice] = []
        for rank, share in enumerate(shares):
            start = rank * self.part
            for at in share:
                self.places.append(BucketPlace(indices[at], start, tuple(shapes[at])))
                start += lengths[at]
            end = self.padded if cut else (rank + 1) * self.part
            if start < end:
                self.gaps.append(slice(start, end))

    def own(self, rank: int) -> slice:
        """Return the elements that a rank owns, padding included."""
        return slice(rank * self.part, (rank + 1) * self.part)

    def counts(self, place: BucketPlace) -> list[int]:
        """Return how many elements of a parameter each rank owns."""
        found = [0] * self.size
        for rank in range(self.size):
            low, high = rank * self.part, (rank + 1) * self.part
            found[rank] = max(0, min(place.start + place.numel, high) - max(place.start, low))
        return found

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Yield what a rank owns of each parameter; at most one piece of each."""
        low, high = rank * self.part, (rank + 1) * self.part
        for place in self.places:
            first, last = max(place.start, low), min(place.start + place.numel, high)
            if first < last:
                yield Piece(place.index, first - place.start, last - place.start, first - low)
