"""A schedule as text: for every step, who sends what to whom and what each rank then holds."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from roundelay.schedule import Cell, Failure
from roundelay.view.picture import CellView, Frame, Picture
from roundelay.view.terminal_moves import moves
from roundelay.view.terminal_text import (
    ASCII,
    UNICODE,
    nbytes_text,
    number_of,
    runs_of,
    safe,
    seconds_text,
    short_sum,
)

__all__ = ["FORMS", "Drawing"]

#: How the cells of a picture can be told, the most telling first.
FORMS = ("full", "short", "list", "counts", "levels", "bars")
#: Of these, the ones with a column per chunk.
GRIDS = ("full", "short", "counts")

#: Beyond these, a step is summed up instead of told transfer by transfer, cell by cell.
MOST_RANKS = 32
MOST_MOVES = 24
FEW_MOVES = 6
#: A listing of what each rank holds is for few ranks.
MOST_LISTED = 16
BAR = 32


class Drawing:
    """Draws the frames of a picture into a given width, all in the same form.

    The form is the first of `FORMS` that fits: `full` (every sum written out), `short` (a0…3),
    `list` (each rank's cells in a row), `counts` (3/8: three contributions of eight), `levels`
    (one sign per cell), or `bars` (how far each rank has come).
    """

    def __init__(self, picture: Picture, *, width: int, ascii_only: bool = False) -> None:
        self.picture = picture
        self.width = width
        self.glyphs = ASCII if ascii_only else UNICODE
        self.ranks = [safe(name, self.glyphs) for name in picture.ranks]
        self.chunks = [safe(name, self.glyphs) for name in picture.chunks]
        self._due = dict(picture.schedule.due_after())
        self._label = max(map(cell_len, self.ranks))
        self._symbols = _is_symbolic(picture)
        self._news = picture.schedule.collective.idempotent  # no data, so no bytes
        self._failures = picture.failures_by_frame()
        self.form = next(form for form in FORMS if self._fits(form))
        self._column = self._widest(self.form) + 2 if self.form in GRIDS else 0

    def title(self) -> Text:
        """Say what is drawn, and in which phases it goes."""
        title = Text(safe(self.picture.title, self.glyphs), style="bold")
        if self.picture.story.plan:
            title.append(f"\n{safe(self.picture.story.plan, self.glyphs)}", style="not bold")
        return title

    def frame(self, number: int) -> RenderableType:
        """Draw one frame: its story, transfers, what each rank holds, and what went wrong."""
        frame = self.picture.frames[number]
        words = safe(self.picture.story.words[number], self.glyphs)
        parts: list[RenderableType] = [self._heading(frame), *([Text(words)] if words else [])]
        if frame.transfers:
            parts += [Text(""), *self._moves(frame)]
        parts += [self._held(frame), *map(self._failure, self._failures.get(number, []))]
        return Group(*parts)

    def failing_frames(self) -> list[int]:
        """List the frames in which something is wrong."""
        return list(self._failures)

    def cost(self) -> Text:
        """Say what the whole schedule costs, on one line."""
        price, dot = self.picture.price, self.glyphs.dot
        if price is None:
            return Text(number_of(len(self.picture.schedule.steps), "step"), style="cyan")
        facts = [number_of(len(price.steps), "step"), number_of(price.messages, "message")]
        if not self._news:
            facts[0] = f"For {nbytes_text(price.nbytes)}: {facts[0]}"
            facts.append(f"a rank sends at most {nbytes_text(max(price.sent))}")
            if price.links:
                link, load = max(price.links.items(), key=lambda item: item[1])
                name = safe(f"{link.src}{self.glyphs.arrow}{link.dst}", self.glyphs)
                facts.append(f"busiest link {name}: {nbytes_text(load)}")
        if price.seconds is not None:
            network = safe(price.network or "", self.glyphs)
            facts.append(f"{seconds_text(price.seconds, self.glyphs)} on {network}")
        return Text(dot.join(facts), style="cyan")

    def legend(self) -> Text:
        """Explain the signs of this form."""
        glyphs = self.glyphs
        signs = [(glyphs.copy, "copy"), (glyphs.reduce, "reduce")]
        if self.form == "levels":
            signs += [(glyphs.levels[1:], "share of the contributions that has arrived")]
        elif self.form != "bars":
            signs += [(glyphs.changed, "changed in this step"), (glyphs.done, "finished")]
        if self.form == "counts":
            signs += [("3/8", "contributions so far")]
        return Text("   ".join(f"{sign} {word}" for sign, word in signs), style="dim")

    def _fits(self, form: str) -> bool:
        schedule = self.picture.schedule
        room = self.width - self._label - 4
        if form == "bars":
            return True
        if schedule.size > MOST_RANKS:
            return False
        if form == "list":
            return schedule.size <= MOST_LISTED and not schedule.collective.reduces
        if form == "levels":
            return schedule.chunks <= room
        if form == "short" and not self._symbols:
            return False
        # Borders and padding take three columns per chunk, the two marks two more.
        return schedule.chunks * (self._widest(form) + 5) <= room

    def _widest(self, form: str) -> int:
        texts = (
            cell_len(self._text(form, cell, view))
            for frame in self.picture.frames
            for cell, view in frame.cells.items()
            if cell in frame.changed or not frame.number
        )
        return max(max(texts, default=0), *map(cell_len, self.chunks))

    def _text(self, form: str, cell: Cell, view: CellView) -> str:
        if form == "short" and not self.picture.schedule.collective.named:
            name = self.picture.chunks[cell.chunk]
            return short_sum(name, sorted(view.ranks), self.glyphs)
        if form == "counts":
            return f"{len(view.ranks)}/{self._due_count(cell)}"
        return safe(view.text, self.glyphs)

    def _due_count(self, cell: Cell) -> int:
        """Count the contributions that a cell waits for; a cell for passing on may get all."""
        return len(self._due.get(cell, ())) or self.picture.schedule.size

    def _heading(self, frame: Frame) -> Text:
        glyphs, picture = self.glyphs, self.picture
        total = len(picture.frames) - 1
        if not frame.number:
            return Text(f"Start, before step 1 of {total}" if total else "Nothing to do")
        bar = min(total, BAR)
        done = round(frame.number * bar / total)
        heading = Text(f"Step {frame.number} of {total}  ", style="bold")
        heading.append(glyphs.full * done + glyphs.empty * (bar - done), style="cyan")
        place = safe(picture.story.places[frame.number], glyphs)
        heading.append(f"  {place}" if place else "")
        if picture.price is not None:
            step = picture.price.steps[frame.number - 1]
            facts = [number_of(step.messages, "message")]
            facts += [] if self._news else [nbytes_text(step.nbytes)]
            if step.seconds is not None:
                facts.append(seconds_text(step.seconds, glyphs))
            heading.append(
                (glyphs.dot if place else "  ") + glyphs.dot.join(facts), style="not bold"
            )
        if frame.number in self._failures:
            heading.append(f"  {glyphs.failed} fails", style="red")
        return heading

    def _moves(self, frame: Frame) -> Iterator[RenderableType]:
        few = FEW_MOVES if self.form == "bars" else MOST_MOVES
        lines = moves(frame.transfers, self.ranks, self.chunks, few=few, glyphs=self.glyphs)
        more = len(lines) - few
        yield Columns(lines[:few], padding=(0, 3), equal=True)
        if more > 0:
            kinds = [transfer.op for transfer in frame.transfers]
            counts = [(kinds.count("copy"), "copy", "copies")]
            counts += [(kinds.count("reduce"), "reduce", "reduces")]
            total = " and ".join(f"{n} {one if n == 1 else many}" for n, one, many in counts if n)
            yield Text(f"{self.glyphs.more} and {more} more like these: {total}", style="dim")

    def _held(self, frame: Frame) -> RenderableType:
        if self.form == "bars":
            return self._bars(frame)
        table = Table(box=box.ASCII2 if self.glyphs is ASCII else box.ROUNDED, border_style="dim")
        table.add_column("", no_wrap=True)
        if self.form in GRIDS:
            for name in self.chunks:
                table.add_column(f" {name}", min_width=self._column, no_wrap=True)
        else:
            names = self.chunks
            table.add_column(f"chunks {names[0]}{self.glyphs.to}{names[-1]}")
        for rank, name in enumerate(self.ranks):
            cells = [Cell(rank, chunk) for chunk in range(len(self.picture.chunks))]
            table.add_row(name, *self._row(frame, cells))
        return table

    def _row(self, frame: Frame, cells: list[Cell]) -> list[Text]:
        if self.form in GRIDS:
            return [self._cell(frame, cell) for cell in cells]
        if self.form == "levels":
            return [Text.assemble(*(self._level(frame, cell) for cell in cells))]
        held = [self._cell(frame, cell) for cell in cells if cell in frame.cells]
        return [Text(" ").join(held)]

    def _cell(self, frame: Frame, cell: Cell) -> Text:
        view = frame.cells.get(cell)
        failures = self._failures.get(frame.number, [])
        failed = any((failure.rank, failure.chunk) == cell for failure in failures)
        if view is None:
            return Text(f" {self.glyphs.failed}" if failed else "", style="bold red")
        changed = cell in frame.changed
        text = self._text(self.form, cell, view)
        if self.form == "list" and not self._symbols:
            text = f"{self.chunks[cell.chunk]}={text}"
        mark = self.glyphs.failed if failed else self.glyphs.done if view.done else " "
        style = "red" if failed else "green" if view.done else "yellow" if changed else ""
        lead = self.glyphs.changed if changed else " "
        return Text(f"{lead}{text}{mark}", style=f"{style} bold" if changed else style)

    def _level(self, frame: Frame, cell: Cell) -> tuple[str, str]:
        view, levels = frame.cells.get(cell), self.glyphs.levels
        if view is None:
            return levels[0], "dim"
        top = len(levels) - 1
        share = len(view.ranks) * top // self._due_count(cell)
        level = top if view.done else max(1, min(top - 1, share))
        style = "green" if view.done else "yellow" if cell in frame.changed else ""
        return levels[level], f"{style} bold" if cell in frame.changed else style

    def _bars(self, frame: Frame) -> RenderableType:
        """Show how far each rank has come; ranks that are equally far share a line."""
        progress: dict[tuple[int, int, int], list[int]] = {}
        arrived = [[0, 0, 0] for _ in self.ranks]
        for cell, due in self._due.items():
            view = frame.cells.get(cell)
            held = 0 if view is None else len(due.intersection(view.ranks))
            row = arrived[cell.rank]
            row[0] += 100 * held // len(due) if due else 100
            row[1] += bool(view and view.done)
            row[2] += 1
        for rank, (share, done, total) in enumerate(arrived):
            progress.setdefault((share, done, total), []).append(rank)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        shown = list(progress.items())[:MOST_LISTED]
        for (share, done, total), ranks in shown:
            parts = share * BAR // (100 * total) if total else 0
            bar = self.glyphs.full * parts + self.glyphs.empty * (BAR - parts)
            told = (
                f"{done} of {number_of(total, 'chunk')} finished" if total else "nothing due here"
            )
            table.add_row(runs_of(self.ranks, ranks, self.glyphs), Text(bar, "green"), told)
        if len(progress) > len(shown):
            left = sum(len(ranks) for _, ranks in list(progress.items())[MOST_LISTED:])
            table.add_row(f"{self.glyphs.more} and {number_of(left, 'more rank')}", "", "")
        return Group(Text(""), table)

    def _failure(self, failure: Failure) -> Text:
        return Text(f"{self.glyphs.failed} {safe(str(failure), self.glyphs)}", style="bold red")


def _is_symbolic(picture: Picture) -> bool:
    """Tell sums of names (a0+a1) from real numbers."""
    return all(
        view.text.startswith(picture.chunks[cell.chunk])
        for cell, view in picture.frames[0].cells.items()
    )
