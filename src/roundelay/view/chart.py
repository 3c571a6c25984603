"""A chart of lines: loss over steps, time over bytes; an SVG that stands by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Axis", "ChartScale", "chart", "framed", "round_step", "scale_of"]

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 80, WIDTH - 150, 48, HEIGHT - 56
FEET = BOTTOM + 22
COLOURS = ("#0b6bcb", "#d9480f", "#2b8a3e", "#862e9c", "#5f6b7a", "#b8860b", "#c2255c")
#: Lines differ in their dashes too, for eyes that don't see the colours.
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4", "10 3", "4 2 1 2")
GRID = 'class="grid" stroke="#8884"'
MARKED = 40  # lines of up to so many points show each of them
TICKS = 6
#: For dark readers; attributes hold for all others.
DARK = """@media (prefers-color-scheme:dark){svg{fill:#eceae6}.page{fill:#16181b}.grid{stroke:#fff2}
path{filter:brightness(1.5)}circle{filter:brightness(1.5)}}"""

Line = Sequence[tuple[float, float]]


def _plain(value: float) -> str:
    return f"{value:g}"


@dataclass(frozen=True, slots=True)
class Axis:
    """What one direction of the paper stands for."""

    label: str
    base: int = 0  # of the logarithm; 0 is linear
    every: int = 1  # a mark for each so-many-th power
    text: Callable[[float], str] = _plain


def chart(curves: Mapping[str, Line], *, title: str, across: Axis, up: Axis) -> str:
    """Return the SVG of the lines, with a key beside them; lines without points are left out."""
    drawn = {name: line for name, line in curves.items() if line}
    points = [point for line in drawn.values() for point in line]
    x = scale_of(across, [x for x, _ in points], LEFT, RIGHT)
    y = scale_of(up, [y for _, y in points], BOTTOM, TOP)
    centre = f'x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 12}"'
    turned = f'transform="translate(16 {(TOP + BOTTOM) / 2}) rotate(-90)"'
    parts = [
        *_grid(across, up, x, y),
        *_curves(drawn, x, y),
        f'<text {centre} text-anchor="middle">{escape(across.label)}</text>',
        f'<text {turned} text-anchor="middle">{escape(up.label)}</text>',
    ]
    return framed(parts, title=title, left=LEFT, size=(WIDTH, HEIGHT), style=DARK)


def framed(
    parts: Iterable[str], *, title: str, left: int, size: tuple[int, int], style: str = ""
) -> str:
    """Return an SVG with a title, which begins at `left`, above its parts."""
    body, (width, height) = "\n".join(parts), size
    rules, page = (f"<style>{style}</style>", ' class="page"') if style else ("", "")
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
font-family="system-ui, sans-serif" font-size="12" fill="#222">
<title>{escape(title)}</title>{rules}<rect{page} width="100%" height="100%" fill="#fff"/>
<text x="{left}" y="26" font-size="15" font-weight="600">{escape(title)}</text>
{body}
</svg>
"""


def _grid(across: Axis, up: Axis, x: ChartScale, y: ChartScale) -> Iterator[str]:
    for value in x.ticks():
        place = x.place(value)
        yield f'<path d="M{place:.1f} {TOP}V{BOTTOM}" {GRID}/>'
        words = escape(across.text(value))
        yield f'<text x="{place:.1f}" y="{FEET}" text-anchor="middle">{words}</text>'
    for value in y.ticks():
        place = y.place(value)
        yield f'<path d="M{LEFT} {place:.1f}H{RIGHT}" {GRID}/>'
        words = escape(up.text(value))
        yield f'<text x="{LEFT - 8}" y="{place + 4:.1f}" text-anchor="end">{words}</text>'


def _curves(curves: Mapping[str, Line], x: ChartScale, y: ChartScale) -> Iterator[str]:
    for number, (name, line) in enumerate(curves.items()):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        style = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}" fill="none"'
        places = [(x.place(one), y.place(other)) for one, other in line]
        path = "L".join(f"{one:.1f} {other:.1f}" for one, other in places)
        yield f'<path d="M{path}" {style}><title>{escape(name)}</title></path>'
        for one, other in places if len(places) <= MARKED else ():
            yield f'<circle cx="{one:.1f}" cy="{other:.1f}" r="2.5" fill="{colour}"/>'
        key = TOP + 14 + 22 * number
        yield f'<path d="M{RIGHT + 14} {key}h24" {style}/>'
        yield f'<text x="{RIGHT + 44}" y="{key + 4}">{escape(name)}</text>'


@dataclass(frozen=True, slots=True)
class ChartScale:
    """Values between `low` and `high` on a stretch of paper; with a base, their logarithms."""

    low: float
    high: float
    start: float
    end: float
    base: int
    step: float  # from mark to mark

    def place(self, value: float) -> float:
        """Return where a value lies."""
        at = math.log(value, self.base) if self.base else value
        return self.start + (at - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return the values that have a mark."""
        count = int((self.high - self.low) / self.step + 1e-9)
        marks = [self.low + number * self.step for number in range(count + 1)]
        return [float(self.base) ** mark if self.base else round(mark, 10) for mark in marks]


def scale_of(axis: Axis, values: Sequence[float], start: float, end: float) -> ChartScale:
    """Return a scale on which all values have a place, with round marks."""
    if axis.base:
        logs = [math.log(value, axis.base) for value in values] or [0.0]
        first = math.floor(min(logs))
        last = max(math.ceil(max(logs)), first + 1)
        return ChartScale(first, last, start, end, axis.base, axis.every)
    least, most = min(values, default=0.0), max(values, default=1.0)
    step = round_step((most - least or 1.0) / TICKS)
    low = math.floor(least / step) * step
    high = max(math.ceil(most / step) * step, low + step)
    return ChartScale(low, high, start, end, 0, step)


def round_step(step: float) -> float:
    """Return the next of 1, 2 and 5 times a power of ten.

    >>> [round_step(step) for step in (0.7, 1.2, 3.0, 70.0)]
    [1.0, 2.0, 5.0, 100.0]
    """
    power = 10.0 ** math.floor(math.log10(step))
    return next((times * power for times in (1, 2, 5) if times * power >= step), 10 * power)
