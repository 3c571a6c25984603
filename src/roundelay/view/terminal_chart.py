"""A chart of lines in a terminal: the same scales as the SVG's, in rows of characters."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from roundelay.view.chart import Axis, Line, scale_of

__all__ = ["terminal_chart"]

MARKS = "●■▲◆○□△◇"
ASCII_MARKS = "*#^+ox%@"
BETWEEN, ASCII_BETWEEN = "·", "."
LEAST = 24  # columns of the paper


def terminal_chart(
    curves: Mapping[str, Line],
    *,
    title: str,
    across: Axis,
    up: Axis,
    columns: int = 80,
    lines: int = 16,
    ascii_only: bool = False,
) -> list[str]:
    """Return the lines of a chart: each curve has a mark; where two meet, the first is seen."""
    drawn = {name: line for name, line in curves.items() if line}
    points = [point for line in drawn.values() for point in line]
    heights = scale_of(up, [y for _, y in points], lines - 1, 0)
    labels = {round(heights.place(value)): up.text(value) for value in heights.ticks()}
    margin = max(map(len, labels.values()), default=0)
    width = max(LEAST, columns - margin - 3)
    places = scale_of(across, [x for x, _ in points], 0, width - 1)
    paper = [[" "] * width for _ in range(lines)]
    marks = ASCII_MARKS if ascii_only else MARKS
    between = ASCII_BETWEEN if ascii_only else BETWEEN
    for number, line in reversed(list(enumerate(drawn.values()))):
        spots = [(round(places.place(x)), round(heights.place(y))) for x, y in line]
        for (x0, y0), (x1, y1) in pairwise(spots):
            for x in range(x0 + 1, x1):
                y = round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
                if paper[y][x] == " ":
                    paper[y][x] = between
        for x, y in spots:
            paper[y][x] = marks[number % len(marks)]
    bar, corner, dash = ("|", "+", "-") if ascii_only else ("│", "└", "─")
    body = [f"{labels.get(at, ''):>{margin}} {bar}{''.join(row).rstrip()}"
            for at, row in enumerate(paper)]  # fmt: skip
    feet = _feet(across, {round(places.place(value)): value for value in places.ticks()}, width)
    key = "   ".join(f"{marks[at % len(marks)]} {name}" for at, name in enumerate(drawn))
    pad = " " * (margin + 2)
    return [title, f"{pad}{up.label}", *body, f"{' ' * margin} {corner}{dash * width}",
            f"{pad}{feet}", f"{pad}{across.label:^{width}}".rstrip(), f"{pad}{key}"]  # fmt: skip


def _feet(across: Axis, marks: Mapping[int, float], width: int) -> str:
    """Write the marks under the paper, those that have room."""
    text = [" "] * width
    free = 0
    for place, value in sorted(marks.items()):
        word = across.text(value)
        start = min(max(0, place - len(word) // 2), width - len(word))
        if start >= free and start >= 0:
            text[start : start + len(word)] = word
            free = start + len(word) + 1
    return "".join(text).rstrip()
