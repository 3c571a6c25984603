"""Parameters one after the other in one long row, of which every rank owns an equal part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roundelay.training._buckets import Place

__all__ = ["Layout", "Piece", "runs"]


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


class Layout:
    """Where parameters lie in a row that is padded until it divides by the number of ranks.

    >>> layout = Layout([0, 1], [(3,), (2, 2)], size=2)
    >>> layout.part, layout.padded
    (4, 8)
    >>> list(layout.pieces(0))
    [Piece(index=0, start=0, stop=3, at=0), Piece(index=1, start=0, stop=1, at=3)]
    >>> list(layout.pieces(1))
    [Piece(index=1, start=1, stop=4, at=0)]
    """

    def __init__(
        self, indices: Sequence[int], shapes: Sequence[tuple[int, ...]], *, size: int
    ) -> None:
        self.places: list[Place] = []
        start = 0
        for index, shape in zip(indices, shapes, strict=True):
            self.places.append(Place(index, start, tuple(shape)))
            start += math.prod(shape)
        self.numel = start
        self.part = -(-start // size)
        self.padded = self.part * size

    def own(self, rank: int) -> slice:
        """Return the elements that a rank owns, padding included."""
        return slice(rank * self.part, (rank + 1) * self.part)

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Yield what a rank owns of each parameter; at most one piece of each."""
        low, high = rank * self.part, (rank + 1) * self.part
        for place in self.places:
            first, last = max(place.start, low), min(place.start + place.numel, high)
            if first < last:
                yield Piece(place.index, first - place.start, last - place.start, first - low)


def runs(keys: Sequence[object], sizes: Sequence[int], *, most: int) -> list[list[int]]:
    """Cut 0, 1, 2, … into runs of one key and at most so many bytes; a larger one is alone.

    >>> runs(["a", "a", "b", "b"], [3, 3, 3, 9], most=6)
    [[0, 1], [2], [3]]
    """
    found: list[list[int]] = []
    filled = 0
    for index, (key, nbytes) in enumerate(zip(keys, sizes, strict=True)):
        if not found or keys[found[-1][0]] != key or filled + nbytes > most:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += nbytes
    return found
