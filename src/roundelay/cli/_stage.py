"""Where drawings are shown: all steps one after the other, or stepped through with arrow keys."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator, Sequence

import click
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from roundelay.cli._screen import place_lines, resizes, screen, split_keys
from roundelay.cli._types import console_for, terminal_size
from roundelay.view import Picture
from roundelay.view.terminal import FORMS, Drawing

GAP = 4

NEXT, BACK, FIRST, LAST, UP, DOWN, QUIT = "next", "back", "first", "last", "up", "down", "quit"
KEYS = {
    **dict.fromkeys(["\x1b[C", "\x1bOC", "l", " ", "\r", "\n"], NEXT),
    **dict.fromkeys(["\x1b[D", "\x1bOD", "h", "\x7f", "\b"], BACK),
    **dict.fromkeys(["\x1b[H", "\x1bOH", "\x1b[1~", "\x1b[7~", "g", "0"], FIRST),
    **dict.fromkeys(["\x1b[F", "\x1bOF", "\x1b[4~", "\x1b[8~", "G", "$"], LAST),
    **dict.fromkeys(["\x1b[A", "\x1bOA", "k"], UP),
    **dict.fromkeys(["\x1b[B", "\x1bOB", "j"], DOWN),
    **dict.fromkeys(["q", "Q", "\x1b", "\x04"], QUIT),
}


class Stage:
    """Draws frame after frame of one picture, or of two side by side (below, when narrow)."""

    def __init__(
        self,
        pictures: Sequence[Picture],
        *,
        ending: RenderableType | None,
        remark: str,
        ascii_only: bool,
    ) -> None:
        self.pictures = pictures
        self.ending = ending  # what the last frame adds: outputs, a comparison
        self.remark = remark  # what is known beyond the picture: the proof
        self.ascii_only = ascii_only
        self.last = max(len(picture.frames) for picture in pictures) - 1
        self._drawings: tuple[int, list[Drawing]] = (0, [])

    def frame(self, number: int, width: int, *, titled: bool = True) -> RenderableType:
        """Draw one moment; a picture that is through rests at its end."""
        drawings = self._at(width)
        frames = []
        for drawing in drawings:
            moment = drawing.frame(min(number, len(drawing.picture.frames) - 1))
            frames.append(Group(drawing.title(), moment) if titled else moment)
        if len(frames) > 1 and drawings[0].width < width:
            beside = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
            for drawing in drawings:
                beside.add_column(width=drawing.width)
            beside.add_row(*frames)
            return beside
        return Group(*(Padding(frame, (0, 0, 1, 0)) for frame in frames[:-1]), frames[-1])

    def footer(self, width: int) -> RenderableType:
        """Say what it costs, what is proved, and what the signs mean."""
        drawings = self._at(width)
        # Two prices stand side by side in the table that ends a comparison.
        costs = [drawings[0].cost()] if len(drawings) == 1 else []
        return Group(*costs, Text(self.remark), drawings[0].legend())

    def first_to_show(self) -> int:
        """Return the frame to begin with: the first that fails, if any does."""
        failing = [n for drawing in self._at(80) for n in drawing.failing_frames()]
        return min(failing, default=0)

    def _at(self, width: int) -> list[Drawing]:
        if self._drawings[0] != width:
            self._drawings = (width, self._fit(width))
        return self._drawings[1]

    def _fit(self, width: int) -> list[Drawing]:
        def drawn(into: int) -> list[Drawing]:
            return [Drawing(p, width=into, ascii_only=self.ascii_only) for p in self.pictures]

        whole = drawn(width)
        if len(whole) == 1:
            return whole
        half = drawn((width - GAP) // 2)
        pairs = zip(half, whole, strict=True)
        fits = all(FORMS.index(a.form) <= FORMS.index(b.form) for a, b in pairs)
        return half if fits else whole


def is_interactive() -> bool:
    """Tell whether a person can step: both ends are terminals that understand control codes."""
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return sys.stdin.isatty() and sys.stdout.isatty() and not dumb


def show(stage: Stage) -> None:
    """Step through interactively, or print every step when piped."""
    console = console_for()
    if is_interactive():
        _step_through(stage, console)
        return
    for number in range(stage.last + 1):
        # Of one picture the title stands at the top; of two, each step must say which is which.
        titled = number == 0 or len(stage.pictures) > 1
        console.print(stage.frame(number, console.width, titled=titled))
        console.print()
    _print_ending(stage, console)


def _print_ending(stage: Stage, console: Console) -> None:
    if stage.ending is not None:
        console.print(stage.ending)
        console.print()
    console.print(stage.footer(console.width))


def _step_through(stage: Stage, console: Console) -> None:
    """Redraw in place as keys arrive; the screen is given back as it was."""
    number, scroll = stage.first_to_show(), 0
    with resizes() as resized, screen(console):
        scroll = _draw(stage, console, number, scroll)
        for key in _keys(resized):
            action = KEYS.get(key)
            if action == QUIT:
                break
            number = _moved(number, action, stage.last)
            scroll = max(0, scroll + {UP: -1, DOWN: 1}.get(action or "", 0))
            scroll = _draw(stage, console, number, scroll)
    console.print(stage.frame(number, console.width))
    _print_ending(stage, console)


def _moved(number: int, action: str | None, last: int) -> int:
    if action == FIRST:
        return 0
    if action == LAST:
        return last
    return max(0, min(last, number + {NEXT: 1, BACK: -1}.get(action or "", 0)))


def _draw(stage: Stage, console: Console, number: int, scroll: int) -> int:
    """Fill the screen with one frame and return how far it is scrolled."""
    console.width, console.height = terminal_size()  # the window may have been resized
    width, height = console.size
    parts = [stage.frame(number, width), Text("")]
    if number == stage.last and stage.ending is not None:
        parts += [stage.ending, Text("")]
    parts.append(stage.footer(width))
    with console.capture() as captured:
        console.print(Group(*parts))
    lines = captured.get().rstrip("\n").split("\n")

    room = max(1, height - 1)
    scroll = min(scroll, max(0, len(lines) - room))
    rest = len(lines) - room - scroll
    arrows = ("<- ->", "up/down") if stage.ascii_only else ("← →", "↑ ↓")
    help_line = f"{arrows[0]} step   Home End   q quit"
    if rest > 0 or scroll:
        help_line += f"   {arrows[1]} scroll ({max(0, rest)} more lines)"
    shown = [*lines[scroll : scroll + room]]
    shown += [""] * (room - len(shown))
    with console.capture() as captured:
        console.print(Text(help_line[: width - 1], style="reverse"), end="")
    shown.append(captured.get())
    place_lines(console, shown)
    return scroll


def _keys(resized: int | None) -> Iterator[str]:
    """Give keys until there are no more, and one that does not exist for every new size."""
    if resized is None:
        yield from iter(click.getchar, "")
        return
    source = sys.stdin.fileno()
    while True:
        ready, _, _ = select.select([source, resized], [], [])
        if resized in ready:
            os.read(resized, 4096)
            yield ""
        if source in ready:
            try:
                typed = os.read(source, 1024)
            except OSError:  # how Linux says that the terminal has gone
                return
            if not typed:
                return
            yield from split_keys(typed.decode("utf-8", "replace"))
