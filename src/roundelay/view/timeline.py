"""The timeline of one step: which bucket was full when, when it travelled, what backward hid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from roundelay.view.chart import framed
from roundelay.view.terminal_text import nbytes_text, seconds_text

__all__ = ["Lane", "timeline"]

WIDTH, LEFT, RIGHT, ROW = 760, 150, 740, 26
TOP = 56
BACKWARD, TRAVEL, SEEN = "#5f6b7a", "#0b6bcb", "#d9480f"

Place = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Lane:
    """One bucket: its bytes, when it was full, and when it travelled; seconds from any start."""

    nbytes: int
    full: float
    began: float
    ended: float


def timeline(lanes: Sequence[Lane], *, began: float, ended: float, title: str) -> str:
    """Return the SVG: backward on top, one line a bucket; what backward did not hide is orange."""
    last = max([ended, *(lane.ended for lane in lanes)])
    scale = (RIGHT - LEFT) / (last - began or 1.0)

    def place(at: float) -> float:
        return LEFT + (max(at, began) - began) * scale

    height = TOP + ROW * (len(lanes) + 1) + 40
    rows = [
        *_bar(TOP, "backward", place(began), place(ended), BACKWARD, seconds_text(ended - began)),
        (
            f'<path d="M{place(ended):.1f} {TOP - 6}V{height - 34}" stroke="{BACKWARD}" '
            f'stroke-dasharray="3 3"/>'
        ),
    ]
    for number, lane in enumerate(lanes, start=1):
        rows += _lane(TOP + ROW * number, number - 1, lane, place, ended)
    rows.append(
        f'<text x="{LEFT}" y="{height - 12}">blue: all-reduced while backward goes on · orange: '
        f"backward is over, and waits · dot: bucket full</text>"
    )
    return framed(rows, title=title, left=16, size=(WIDTH, height))


def _lane(top: float, number: int, lane: Lane, place: Place, ended: float) -> Iterator[str]:
    name = f"bucket {number}, {nbytes_text(lane.nbytes)}"
    took = seconds_text(lane.ended - lane.began)
    split = min(max(ended, lane.began), lane.ended)
    yield from _bar(top, name, place(lane.began), place(split), TRAVEL, took)
    if split < lane.ended:
        yield from _bar(top, "", place(split), place(lane.ended), SEEN, took)
    yield f'<circle cx="{place(lane.full):.1f}" cy="{top + 9}" r="3" fill="#222"/>'


def _bar(top: float, name: str, start: float, end: float, colour: str, hint: str) -> Iterator[str]:
    width = max(end - start, 1.0)
    if name:
        yield f'<text x="{LEFT - 10}" y="{top + 13}" text-anchor="end">{escape(name)}</text>'
    yield (
        f'<rect x="{start:.1f}" y="{top}" width="{width:.1f}" height="18" rx="2" fill="{colour}">'
        f"<title>{escape(name)} {escape(hint)}</title></rect>"
    )
