"""A drawing of a benchmark: time over bytes on two logarithmic axes, one line a contender."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from roundelay.bench import Row
from roundelay.view.terminal_text import nbytes_text, seconds_text

__all__ = ["plot"]

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 80, WIDTH - 150, 48, HEIGHT - 56
FEET = BOTTOM + 22
COLOURS = ("#0b6bcb", "#d9480f", "#2b8a3e", "#862e9c", "#5f6b7a")
#: Contenders differ in their dashes too, for eyes that don't see the colours.
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4")
GRID = 'stroke="#8884"'

Line = list[tuple[int, float]]


def plot(rows: Sequence[Row], title: str) -> str:
    """Return the SVG; rows without bytes, as a barrier's, are left out."""
    rows = [row for row in rows if row.nbytes]
    names = dict.fromkeys(name for row in rows for name in row.timings)
    curves: dict[str, Line] = {
        name: [(row.nbytes, row.timings[name].seconds) for row in rows if name in row.timings]
        for name in names
    }
    curves["memory floor"] = [(row.nbytes, row.floor) for row in rows if row.floor]
    points = [point for line in curves.values() for point in line]
    across = _Axis([nbytes for nbytes, _ in points], LEFT, RIGHT, base=2, every=3)
    up = _Axis([seconds for _, seconds in points], BOTTOM, TOP, base=10, every=1)
    parts = "\n".join([*_grid(across, up), *_curves(curves, across, up)])
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" \
font-family="system-ui, sans-serif" font-size="12" fill="#222">
<title>{escape(title)}</title><rect width="100%" height="100%" fill="#fff"/>
<text x="{LEFT}" y="26" font-size="15" font-weight="600">{escape(title)}</text>
{parts}
<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">\
bytes of the largest buffer of a rank</text>
</svg>
"""


def _grid(across: _Axis, up: _Axis) -> Iterator[str]:
    for value in across.ticks():
        x = across.place(value)
        yield f'<path d="M{x:.1f} {TOP}V{BOTTOM}" {GRID}/>'
        yield f'<text x="{x:.1f}" y="{FEET}" text-anchor="middle">{nbytes_text(value)}</text>'
    for value in up.ticks():
        y = up.place(value)
        yield f'<path d="M{LEFT} {y:.1f}H{RIGHT}" {GRID}/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{seconds_text(value)}</text>'


def _curves(curves: dict[str, Line], across: _Axis, up: _Axis) -> Iterator[str]:
    drawn = {name: line for name, line in curves.items() if line}
    for number, (name, line) in enumerate(drawn.items()):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        style = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}" fill="none"'
        places = [(across.place(nbytes), up.place(seconds)) for nbytes, seconds in line]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        yield f'<path d="M{path}" {style}><title>{escape(name)}</title></path>'
        for x, y in places:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'
        key = TOP + 14 + 22 * number
        yield f'<path d="M{RIGHT + 14} {key}h24" {style}/>'
        yield f'<text x="{RIGHT + 44}" y="{key + 4}">{escape(name)}</text>'


class _Axis:
    """A logarithmic axis between two places on the paper."""

    def __init__(
        self, values: Sequence[float], start: float, end: float, *, base: int, every: int
    ) -> None:
        logs = [math.log(value, base) for value in values] or [0.0]
        self._low = math.floor(min(logs))
        self._high = max(math.ceil(max(logs)), self._low + 1)
        self._start, self._end, self._base, self._every = start, end, base, every

    def place(self, value: float) -> float:
        """Return where a value lies."""
        share = (math.log(value, self._base) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return the powers of the base that are marked."""
        return [float(self._base) ** n for n in range(self._low, self._high + 1, self._every)]
