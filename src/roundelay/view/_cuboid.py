"""The cube of a matrix product in perspective: a box for each rank, drawn apart where it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roundelay.contraction import Cube

Corner = tuple[float, float]
Run = tuple[float, float]  # where an edge of a box begins and ends

#: How far one step into the depth goes, to the left and up, for each step across.
DEPTH = (-0.5, -0.42)
APART, APART_IN_DEPTH = 0.55, 1.7  # between the pieces of a cut, in cells
BETWEEN_ENTRIES = 0.28  # of the batch, where all have the same rows


@dataclass(frozen=True, slots=True)
class Box:
    """What one rank computes, or a part of it: o across, b and s down, h into the depth."""

    rank: int
    across: Run
    down: Run
    deep: Run
    cells: tuple[int, int, int]  # o, rows, h


@dataclass(frozen=True)
class Cuboid:
    """Boxes with their places on paper, from the hindmost to the foremost."""

    cube: Cube
    room: Corner

    def boxes(self) -> list[Box]:
        """Return all boxes, in the order in which they hide each other."""
        boxes = [box for rank in range(self.cube.size) for box in self._of(rank)]
        return sorted(boxes, key=lambda box: (-box.deep[0], -box.down[0], -box.across[0]))

    def _of(self, rank: int) -> Iterator[Box]:
        batch, rows, depth = self.cube.held(rank, "X")
        _, across = self.cube.held(rank, "W")
        o, h = self._run("o", across, APART), self._run("h", depth, APART_IN_DEPTH)
        length = rows.stop - rows.start
        for entry in range(batch.start, batch.stop):
            top = self._entry(entry)
            low, high = self._run("s", rows, APART)
            cells = (across.stop - across.start, length, depth.stop - depth.start)
            yield Box(rank, o, (top + low, top + high), h, cells)

    def _run(self, index: str, piece: slice, apart: float) -> Run:
        number = self.cube.pieces(index).index(piece)
        return piece.start + number * apart, piece.stop + number * apart

    def _entry(self, entry: int) -> float:
        """Return where an entry of the batch begins."""
        pieces = self.cube.pieces("b")
        cuts = len([piece for piece in pieces if piece.start <= entry]) - 1
        own = self._length("s", APART)
        return entry * (own + BETWEEN_ENTRIES) + cuts * (APART - BETWEEN_ENTRIES / 2)

    def _length(self, index: str, apart: float) -> float:
        return self.cube.lengths[index] + apart * (len(self.cube.pieces(index)) - 1)

    @property
    def extent(self) -> tuple[float, float, float]:
        """How long the cube is across, down and into the depth, with what lies between pieces."""
        down = self._entry(self.cube.lengths["b"] - 1) + self._length("s", APART)
        return self._length("o", APART), down, self._length("h", APART_IN_DEPTH)

    @property
    def scale(self) -> float:
        """How long a cell is on paper."""
        across, down, deep = self.extent
        wide, high = across - DEPTH[0] * deep, down - DEPTH[1] * deep
        return min(self.room[0] / wide, self.room[1] / high, 34.0)

    @property
    def height(self) -> float:
        """How high the drawing is."""
        return (self.extent[1] - DEPTH[1] * self.extent[2]) * self.scale

    def at(self, across: float, down: float, deep: float) -> Corner:
        """Return where a point of the cube lies on paper."""
        depth = self.extent[2]
        x = (across + DEPTH[0] * (deep - depth)) * self.scale
        y = (down + DEPTH[1] * (deep - depth)) * self.scale
        return x, y
