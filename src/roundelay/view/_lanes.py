"""Where everything of a static picture lies: ranks are lanes, time runs down, band by band."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roundelay.view._shape import messages, slots
from roundelay.view.captions import brief
from roundelay.view.picture import Picture

__all__ = ["Lanes"]

LABELS = 66  # left of the lanes: the names of the steps
HEADER = 26  # above the first band: the names of the ranks
CHARACTER = 6.1  # width of one, in the cells' font
SMALLEST, LETTER = 4.0, 13.0  # the least width of a cell, of one that takes a letter
SPACE, CROWDED = 26.0, 40  # between lanes, up to so many cells abreast; then half of it
ONE_ROW = 16  # more slots than this are stacked in rows
#: More cells than this and each band shows only what its step wrote.
MOST_CELLS = 20_000


@dataclass(frozen=True, slots=True)
class Lanes:
    """The geometry of one picture, from its top left corner."""

    slots: list[dict[int, int]]  # by rank: chunk to slot
    columns: int
    rows: int
    cell: float  # width; cells that stand in one row are higher than wide
    height: float  # of a cell
    space: float  # between lanes
    reach: float  # between bands, for the arrows
    texts: bool  # whole texts fit into the cells
    briefs: bool  # their short forms do
    sparse: bool

    @classmethod
    def of(cls, picture: Picture, room: float) -> Lanes:
        """Find the largest cells with which the picture is about `room` wide."""
        mine = slots(picture)
        most = max(1, *map(len, mine))
        columns = most if most <= ONE_ROW else math.ceil(math.sqrt(most))
        size = len(picture.ranks)
        full, short = _longest(picture)
        space = SPACE if size * columns <= CROWDED else SPACE / 2
        fitting = (room - LABELS - size * space) / (size * columns) - 2
        cell = math.floor(min(full if full <= fitting else short, max(SMALLEST, fitting)))
        # A lane must be wide enough for its name, however few and small its cells are.
        names = max(len(name) for name in picture.ranks) * 6.6
        space = max(space, names + 6 - columns * (cell + 2))
        held = sum(len(frame.cells) for frame in picture.frames)
        return cls(
            slots=[{chunk: slot for slot, chunk in enumerate(chunks)} for chunks in mine],
            columns=columns,
            rows=math.ceil(most / columns),
            cell=cell,
            height=26.0 if cell >= LETTER else cell if most > columns else max(10.0, cell),
            space=space,
            reach=(46.0 if cell >= LETTER else 34.0) + 2.5 * min(_crossings(picture), 24),
            texts=full <= cell,
            briefs=short <= cell,
            sparse=held > MOST_CELLS,
        )

    @property
    def letters(self) -> bool:
        """Say whether cells are large enough for a letter and for bars."""
        return self.cell >= LETTER

    @property
    def width(self) -> float:
        """Return the width of the whole picture."""
        return LABELS + len(self.slots) * self._lane

    @property
    def block(self) -> float:
        """Return the height of one rank's cells in one band."""
        return self.rows * (self.height + 2) - 2

    @property
    def _lane(self) -> float:
        return self.columns * (self.cell + 2) - 2 + self.space

    def top(self, frame: int) -> float:
        """Return where the cells of a frame begin."""
        return HEADER + frame * (self.block + self.reach)

    def bottom(self, frames: int) -> float:
        """Return where the last of `frames` bands ends."""
        return self.top(frames - 1) + self.block

    def middle(self, rank: int) -> float:
        """Return the middle of a rank's lane."""
        return LABELS + rank * self._lane + (self._lane - self.space) / 2

    def corner(self, frame: int, rank: int, chunk: int) -> tuple[float, float]:
        """Return the top left corner of a cell."""
        row, column = divmod(self.slots[rank].get(chunk, 0), self.columns)
        x = LABELS + rank * self._lane + column * (self.cell + 2)
        return x, self.top(frame) + row * (self.height + 2)

    def curve(
        self, frame: int, src: int, dst: int, chunks: list[int]
    ) -> tuple[float, float, float, float]:
        """Return both ends of a message that leads to `frame`: from cells above to cells below."""
        x1, x2 = (
            sum(self.corner(0, rank, chunk)[0] for chunk in chunks) / len(chunks) + self.cell / 2
            for rank in (src, dst)
        )
        return x1, self.top(frame - 1) + self.block + 2, x2, self.top(frame) - 3


def _longest(picture: Picture) -> tuple[float, float]:
    """Return the widths that the longest text needs, in full and in short."""
    pairs = {
        (len(view.text), len(brief(picture.chunks[cell.chunk], view)))
        for frame in picture.frames
        # What a step did not write, an earlier frame has shown already.
        for cell in (frame.changed if frame.number else frame.cells)
        for view in (frame.cells[cell],)
    }
    full, short = (max((pair[which] for pair in pairs), default=0) for which in (0, 1))
    return max(30.0, math.ceil(full * CHARACTER + 10)), max(30.0, math.ceil(short * CHARACTER + 10))


def _crossings(picture: Picture) -> int:
    """Count the messages of the fullest step beyond one per rank."""
    fullest = max(len(messages(frame.transfers)) for frame in picture.frames)
    return max(0, fullest - len(picture.ranks))
