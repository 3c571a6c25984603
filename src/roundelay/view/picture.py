"""What there is to see of a schedule, frame by frame; terminal, SVG and page all draw this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from roundelay.schedule import (
    Algebra,
    Cell,
    Expression,
    Failure,
    Price,
    Schedule,
    Transfer,
    find_failures,
    held_at_start,
    replay,
)
from roundelay.view._graph import Shape, shape_of
from roundelay.view.languages import Language
from roundelay.view.phases import Phase
from roundelay.view.phrases import Phrases
from roundelay.view.story import Story, story_of

__all__ = ["CellView", "Frame", "Picture", "picture", "title_of"]


@dataclass(frozen=True, slots=True)
class CellView:
    """What one cell holds: whose contributions, and how that reads."""

    ranks: tuple[int, ...]  # contributing ranks, in the order they were folded
    text: str  # 'a0+a1', or numbers
    done: bool  # holds what the contract asks of this cell


@dataclass(frozen=True, slots=True)
class Frame:
    """The moment after a step; frame 0 is the moment before the first."""

    number: int
    transfers: tuple[Transfer, ...]  # that led here
    cells: Mapping[Cell, CellView]  # every cell that holds something
    changed: frozenset[Cell]

    @property
    def step(self) -> int | None:
        """The step that led here; none led to frame 0."""
        return self.number - 1 if self.number else None


@dataclass(frozen=True, slots=True)
class Picture:
    """A schedule ready to be drawn."""

    title: str
    schedule: Schedule
    frames: tuple[Frame, ...]
    failures: tuple[Failure, ...]  # of steps, and of the end
    price: Price | None
    ranks: tuple[str, ...]  # names to show
    chunks: tuple[str, ...]
    story: Story
    shape: Shape
    language: Language = "en"

    def failures_by_frame(self) -> dict[int, list[Failure]]:
        """Sort the failures by the frame that shows them; what is wrong at the end, by the last."""
        found: dict[int, list[Failure]] = {}
        for failure in self.failures:
            number = len(self.frames) - 1 if failure.step is None else failure.step + 1
            found.setdefault(number, []).append(failure)
        return dict(sorted(found.items()))


def picture(
    schedule: Schedule,
    *,
    values: Sequence[Mapping[Cell, str]] | None = None,
    price: Price | None = None,
    rank_name: str = "GPU",
    title: str | None = None,
    hosts: Mapping[str, Sequence[int]] | None = None,
    phases: Sequence[Phase] = (),
    language: Language = "en",
) -> Picture:
    """Return all frames of a schedule; `values[frame][cell]` replaces the symbols by real numbers.

    A schedule that fails its proof has a picture too, with the failures in it. `hosts` are the
    ranks that the network puts together, by name; without, they are told by who talks to whom.
    `phases` are those of a nested schedule; without, they are told by what happens to the data.
    """
    frames = tuple(_frames(schedule, values))
    ranks = tuple(f"{rank_name}{rank}" for rank in range(schedule.size))
    shape = shape_of(schedule, hosts)
    return Picture(
        title=title or schedule.name,
        schedule=schedule,
        frames=frames,
        failures=tuple(find_failures(schedule)),
        price=price,
        ranks=ranks,
        chunks=tuple(map(schedule.chunk_name, range(schedule.chunks))),
        story=story_of(schedule, frames, ranks, shape, phases, language),
        shape=shape,
        language=language,
    )


def title_of(schedule: Schedule, language: Language = "en", *, op: str = "", hosts: int = 0) -> str:
    """Name a schedule, its ranks and root; the names of our own algorithms say the collective, too.

    >>> from roundelay.algorithms import algorithms
    >>> title_of(algorithms.load("reduce_binomial").schedule(4, 1))
    'reduce_binomial on 4 ranks, root 1'
    """
    collective, name, say = schedule.collective, schedule.name, Phrases(language)
    named = name if name.startswith(collective.name) else f"{name}: {collective.name}"
    root = say("title root", root=schedule.root) if collective.rooted else ""
    with_op = say("title op", op=op) if op and collective.reduces else ""
    ranks = say("ranks", n=schedule.size)
    if hosts:
        ranks = say("of hosts", ranks=ranks, n=hosts)
    return say("title", name=named, ranks=ranks) + root + with_op


def _frames(schedule: Schedule, values: Sequence[Mapping[Cell, str]] | None) -> Iterator[Frame]:
    due = dict(schedule.due_after())
    collective = schedule.collective
    join = " " if collective.idempotent else "+"

    def view(frame: int, cell: Cell, expression: Expression) -> CellView:
        ranks = tuple(expression.leaves())
        if collective.idempotent:
            ranks = tuple(dict.fromkeys(ranks))  # news heard twice is no more news
        if values is not None:
            text = values[frame].get(cell, "")
        else:
            name = schedule.chunk_name(cell.chunk)
            text = join.join(name if collective.named else f"{name}{rank}" for rank in ranks)
        return CellView(ranks, text, due.get(cell) == frozenset(ranks))

    algebra = Algebra()
    cells = {cell: view(0, cell, value) for cell, value in held_at_start(schedule, algebra).items()}
    yield Frame(0, (), cells, frozenset())
    for number, step in enumerate(replay(schedule, algebra), start=1):
        cells = {**cells, **{w.cell: view(number, w.cell, w.value) for w in step.writes}}
        changed = frozenset(write.cell for write in step.writes)
        yield Frame(number, schedule.steps[step.number], cells, changed)
