"""Where everything of a static picture lies: ranks are lanes, time runs down, band by band."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from roundelay.view._shape import messages, slots
from roundelay.view.captions import brief, printable
from roundelay.view.phrases import Phrases, wrapped
from roundelay.view.picture import Picture

LABELS = 250  # left of the lanes: what each step does
MEASURE = 38  # characters of that abreast
LINE = 15.5  # its height, line by line
HEADER = 26  # above the first band: the names of the ranks
HOSTS = 22  # above those, the names of their hosts
CHARACTER = 6.1  # width of one, in the cells' font
SMALLEST, LETTER = 4.0, 13.0  # the least width of a cell, of one that takes a letter
SPACE, CROWDED = 26.0, 40  # between lanes, up to so many cells abreast; then half of it
MOST_ROOM = 1600.0  # what a picture may take where that makes its cells large enough for letters
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
    tops: list[float]  # of the bands
    heads: list[list[str]]  # beside each band: which step it is, line by line
    told: list[list[str]]  # below that: what it does
    hosts: float  # room for the names of hosts
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
        if LETTER > fitting >= LETTER * room / MOST_ROOM:
            fitting = LETTER  # a little wider, for the sake of letters
        cell = math.floor(min(full if full <= fitting else short, max(SMALLEST, fitting)))
        # A lane must be wide enough for its name, however few and small its cells are.
        names = max(len(name) for name in picture.ranks) * 6.6
        space = max(space, names + 6 - columns * (cell + 2))
        held = sum(len(frame.cells) for frame in picture.frames)
        rows, hosts = math.ceil(most / columns), HOSTS if picture.shape.hosts else 0.0
        height = 26.0 if cell >= LETTER else cell if most > columns else max(10.0, cell)
        reach = (46.0 if cell >= LETTER else 34.0) + 2.5 * min(_crossings(picture), 24)
        story, say = picture.story, Phrases(picture.language)
        heads = [
            wrapped(printable(step_label(number, place, say)), MEASURE - 4)
            for number, place in enumerate(story.places)
        ]
        told = [wrapped(printable(words), MEASURE) for words in story.words]
        lines = [len(head) + len(words) for head, words in zip(heads, told, strict=True)]
        return cls(
            slots=[{chunk: slot for slot, chunk in enumerate(chunks)} for chunks in mine],
            columns=columns,
            rows=rows,
            cell=cell,
            height=height,
            space=space,
            tops=list(_tops(lines, rows * (height + 2) - 2, reach, HEADER + hosts)),
            heads=heads,
            told=told,
            hosts=hosts,
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

    def beside(self, frame: int) -> float:
        """Return where the words for a frame begin: above its band, where its arrows do."""
        return self.tops[frame - 1] + self.block + 18 if frame else 12.0

    @property
    def bottom(self) -> float:
        """Return where the last band, and the words beside it, end."""
        last = len(self.tops) - 1
        words = self.beside(last) + LINE * (len(self.heads[last]) + len(self.told[last]) - 1) + 4
        return max(self.tops[last] + self.block, words)

    @property
    def across(self) -> float:
        """Return the width of one rank's cells."""
        return self._lane - self.space

    def left(self, rank: int) -> float:
        """Return where a rank's cells begin."""
        return LABELS + rank * self._lane

    def middle(self, rank: int) -> float:
        """Return the middle of a rank's lane."""
        return self.left(rank) + self.across / 2

    def corner(self, frame: int, rank: int, chunk: int) -> tuple[float, float]:
        """Return the top left corner of a cell."""
        row, column = divmod(self.slots[rank].get(chunk, 0), self.columns)
        x = self.left(rank) + column * (self.cell + 2)
        return x, self.tops[frame] + row * (self.height + 2)

    def curve(
        self, frame: int, src: int, dst: int, chunks: list[int]
    ) -> tuple[float, float, float, float]:
        """Return both ends of a message that leads to `frame`: from cells above to cells below."""
        x1, x2 = (
            sum(self.corner(0, rank, chunk)[0] for chunk in chunks) / len(chunks) + self.cell / 2
            for rank in (src, dst)
        )
        return x1, self.tops[frame - 1] + self.block + 2, x2, self.tops[frame] - 3


def step_label(number: int, place: str, say: Phrases) -> str:
    """Say which step leads to a frame, and where in the story it is.

    >>> step_label(0, "", Phrases()), step_label(2, "all-gather, 1 of 3", Phrases())
    ('Start', 'Step 2 · all-gather, 1 of 3')
    """
    step = say("step", n=number) if number else say("start")
    return " · ".join(filter(None, [step, place]))


def _tops(lines: list[int], block: float, reach: float, header: float) -> Iterator[float]:
    """Yield where the bands begin: so far apart that arrows, and the words beside, have room."""
    top = max(header, LINE * lines[0] - block + 6)
    yield top
    for count in lines[1:]:
        top += block + max(reach, LINE * count + 12 - block)
        yield top


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
