"""The timeline of a recorded run as SVG: a block for every rank, on one axis of time."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from roundelay.records import Event, RunRecord
from roundelay.view._shape import colour
from roundelay.view.captions import printable
from roundelay.view.chart import round_step
from roundelay.view.languages import Language
from roundelay.view.run_lanes import RunRow, RunWindow, rows_of
from roundelay.view.run_summary import summary
from roundelay.view.run_words import run_say
from roundelay.view.terminal_text import nbytes_text, seconds_text

__all__ = ["PATTERNS", "run_style", "run_svg"]

MARGIN, LEFT, WIDTH = 24.0, 132.0, 1000.0
TOP, BAR, ROW, GAP, AXIS = 76.0, 24.0, 30.0, 16.0, 44.0
CHARACTER = 6.4
LEAST_ARROW = 0.04  # of the window: shorter waits are not worth an arrow
MOST_ARROWS = 60
HUES = {"forward": 250, "backward": 160, "exchange": 95, "step": 310, "checkpoint": 20, "call": 215,
        "message": 190, "phase": 280}  # fmt: skip
MEANINGS = ("forward", "backward", "exchange", "step", "checkpoint", "call", "message")
PATTERNS = (
    '<defs><pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="hatched" width="6" height="6"/>'
    '<path class="hatch" d="M0 0V6" stroke-width="4"/></pattern>'
    '<marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" '
    'orient="auto"><path class="tip" d="M0 0L6 3L0 6Z"/></marker></defs>'
)
STYLE = """
.page{fill:#fff}.ink{fill:#1f2328}.soft{fill:#5b6168}.lane{fill:#f4f3ef}.tick{stroke:#dcd9d2}
.wait{fill:url(#wait)}.hatched{fill:#fff3d6}.hatch{stroke:#f0a92d}.arrow{fill:none;stroke:#c2410c;
stroke-width:1.5}.tip{fill:#c2410c}.late{fill:#c2410c}.queued{stroke:#8d949b;stroke-width:1.5}
.failed{stroke:#c2410c;stroke-width:2.5}
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
.title{font-size:19px;font-weight:650}.name{font-weight:650}.in{font-size:11.5px;
pointer-events:none}.at{font-size:11.5px;text-anchor:middle}.bar{stroke-width:1}
"""
DARK = """
.page{fill:#16181b}.ink{fill:#eceae6}.soft{fill:#a3a8ae}.lane{fill:#1f2226}.tick{stroke:#34383d}
.hatched{fill:#3a2f16}.hatch{stroke:#b9801d}.arrow{stroke:#ff8a50}.tip{fill:#ff8a50}
.late{fill:#ff8a50}.queued{stroke:#777e86}.failed{stroke:#ff8a50}
"""


def run_style() -> str:
    """Return the style of the drawing, for light and dark readers."""

    def rules(lightness: float, chroma: float, line: float) -> str:
        return "".join(
            f".{kind}{{fill:{colour(lightness, chroma, hue)};stroke:{colour(line, 0.1, hue)}}}"
            for kind, hue in HUES.items()
        )

    dark = f"@media (prefers-color-scheme:dark){{{rules(0.5, 0.09, 0.68)}{DARK}}}"
    return f"\n{rules(0.84, 0.09, 0.6)}{STYLE}{dark}\n"


def run_svg(
    run: RunRecord, window: RunWindow, *, style: str | None = None, language: Language = "en"
) -> str:
    """Return the drawing of a window; without `style` the page around has that, and `PATTERNS`."""
    return _Drawing(run, window, language).svg(style)


class _Drawing:
    """One window, and where its parts lie."""

    def __init__(self, run: RunRecord, window: RunWindow, language: Language) -> None:
        self.run, self.window, self.language = run, window, language
        self.scale = WIDTH / max(1, window.end - window.start)
        self.summary = summary(run, window)
        self.blocks: list[tuple[float, list[RunRow]]] = []  # of every rank: its top, and its rows
        top = TOP
        for record in run.ranks:
            rows = rows_of(record, run, window)
            self.blocks.append((top, rows))
            top += ROW * len(rows) + GAP
        self.bottom = top - GAP
        #: Where a call lies, by rank, group and number.
        self.calls: dict[tuple[int, int, int], tuple[Event, float, int]] = {}

    def x(self, at: int) -> float:
        inside = min(max(at, self.window.start), self.window.end)
        return MARGIN + LEFT + (inside - self.window.start) * self.scale

    def say(self, key: str, **fill: object) -> str:
        return run_say(key, self.language, **fill)

    def svg(self, style: str | None) -> str:
        width = 2 * MARGIN + LEFT + WIDTH
        height = self.bottom + AXIS + 44
        title = printable(self._title())
        box = f'width="{_n(width)}" height="{_n(height)}"'
        view = f'viewBox="0 0 {_n(width)} {_n(height)}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {box} {view}>',
            f"<title>{escape(title)}</title>",
            *([] if style is None else [f"<style>{style}</style>", PATTERNS]),
            f'<rect class="page" {box} rx="14"/>',
            _text("title ink", MARGIN, 36, title),
            _text("soft", MARGIN, 58, self._verdict()),
            *self._axis(),
            *(part for number in range(len(self.blocks)) for part in self._rank(number)),
            *self._arrows(),
            *self._legend(self.bottom + AXIS + 20),
            "</svg>",
            "",
        ]
        return "\n".join(parts)

    def _title(self) -> str:
        program = self.run.ranks[0].program.rpartition("/")[2] if self.run.ranks else ""
        length = seconds_text((self.window.end - self.window.start) / 1e9)
        return self.say("title", program=program, window=self.window.name, length=length,
                        ranks=len(self.run.ranks))  # fmt: skip

    def _verdict(self) -> str:
        """Say in a line who waits for whom, and what computing hides."""
        told = []
        if (straggler := self.summary.straggler) is not None:
            rank, total = straggler
            told.append(self.say("last", rank=rank, total=seconds_text(total / 1e9)))
        shares = [one.overlap for one in self.summary.ranks if one.overlap is not None]
        if shares:
            told.append(self.say("hid", share=f"{100 * sum(shares) / len(shares):.0f}"))
        return " ".join(told)

    def _axis(self) -> Iterator[str]:
        length = self.window.end - self.window.start
        step = round_step(length / 10)
        at = 0.0
        while at <= length:
            place = MARGIN + LEFT + at * self.scale
            yield f'<path class="tick" d="M{_n(place)} {_n(TOP - 8)}V{_n(self.bottom + 8)}"/>'
            yield _text("at soft", place, self.bottom + 26, seconds_text(at / 1e9) if at else "0")
            at += step

    def _rank(self, number: int) -> Iterator[str]:
        top, rows = self.blocks[number]
        record = self.run.ranks[number]
        straggler = self.summary.straggler
        late = straggler is not None and straggler[0] == record.rank
        named = self.say("rank", rank=record.rank)
        yield _text(f"name {'late' if late else 'ink'}", MARGIN, top + 16, named)
        for place, row in enumerate(rows):
            y = top + ROW * place
            lane = f'x="{_n(MARGIN + LEFT)}" y="{_n(y)}" width="{_n(WIDTH)}" height="{_n(BAR)}"'
            yield f'<rect class="lane" {lane} rx="3"/>'
            yield (f'<text class="soft" x="{_n(MARGIN + LEFT - 10)}" y="{_n(y + 16)}" '
                   f'text-anchor="end">{self.say(f"row {row.label}")}</text>')  # fmt: skip
            yield from self._queued(row, y)
            for event, depth, end in row.events:
                if event.kind == "call":
                    self.calls[record.rank, event.group, event.call] = event, y, end
                yield from self._event(event, y, depth, end)
            for event, depth, end in row.events:
                room = self.x(end) - self.x(event.began) - 8
                if depth == 0 and (words := _fitting(printable(event.title), room)):
                    yield _text("in ink", self.x(event.began) + 5, y + BAR / 2 + 4, words)

    def _queued(self, row: RunRow, y: float) -> Iterator[str]:
        """Yield a line from where a call was asked for to where it began; bars lie over it."""
        for event, _, _ in row.events:
            asked, began = self.x(event.asked), self.x(event.began)
            if event.kind == "call" and began - asked > 2:  # noqa: PLR2004 - pixels
                yield f'<path class="queued" d="M{_n(asked)} {_n(y + BAR / 2)}H{_n(began)}"/>'

    def _event(self, event: Event, y: float, depth: int, end: int) -> Iterator[str]:
        first, last = self.x(event.began), self.x(end)
        inset = min(depth, 2) * 4.0
        top, height = y + inset, BAR - 2 * inset
        kind = "wait" if event.kind == "gather" else event.kind
        failed = " failed" if event.failed else ""
        width = max(last - first, 0.8)
        hint = escape(printable(self._hint(event, end)))
        place = f'y="{_n(top)}" height="{_n(height)}" rx="2"'
        yield (
            f'<rect class="bar {kind}{failed}" x="{_n(first)}" width="{_n(width)}" {place}>'
            f"<title>{hint}</title></rect>"
        )
        if event.kind == "call" and event.waited and end > event.began:
            # When within the call is not written down; most of it is before the last one comes.
            waits = width * min(1.0, event.waited / (end - event.began))
            if waits > 1:
                yield (
                    f'<rect class="wait" x="{_n(first)}" width="{_n(waits)}" {place}>'
                    f"<title>{hint}</title></rect>"
                )

    def _arrows(self) -> Iterator[str]:
        """Yield an arrow from each rank that waited long to the one that came last."""
        least = (self.window.end - self.window.start) * LEAST_ARROW
        found = []
        for (_, group, number), (event, y, end) in self.calls.items():
            there = self.calls.get((event.waits_for, group, number))
            late = there is not None and self.window.start <= there[0].began > event.began
            if there is not None and late and event.waited >= least:
                found.append((event.waited, event, y, end, *there))
        found.sort(key=lambda one: -one[0])
        for _, event, y, end, other, other_y, _ in found[:MOST_ARROWS]:
            at = self.x(min(other.began, end))
            start = self.x(event.began) + (at - self.x(event.began)) * 0.6
            down = other_y > y
            y1, y2 = (y + BAR, other_y) if down else (y, other_y + BAR)
            bend = (y1 + y2) / 2
            yield (f'<path class="arrow" d="M{_n(start)} {_n(y1)}C{_n(start)} {_n(bend)} {_n(at)} '
                   f'{_n(bend)} {_n(at)} {_n(y2)}" marker-end="url(#tip)"/>')  # fmt: skip

    def _legend(self, y: float) -> Iterator[str]:
        x = MARGIN
        kinds = {
            event.kind for _, rows in self.blocks for row in rows for event, _, _ in row.events
        }
        for kind in (*(kind for kind in MEANINGS if kind in kinds), "wait", "arrow"):
            words = self.say(f"kind {kind}")
            if kind == "arrow":
                yield f'<path class="arrow" d="M{_n(x)} {_n(y - 5)}h20" marker-end="url(#tip)"/>'
            else:
                yield (f'<rect class="bar {kind}" x="{_n(x)}" y="{_n(y - 12)}" width="22" '
                       f'height="15" rx="2"/>')  # fmt: skip
            yield _text("soft", x + 29, y, words)
            x += 48 + 7.0 * sum(2 if character > "\u2e80" else 1 for character in words)

    def _hint(self, event: Event, end: int) -> str:
        """Say all that is known of an event."""
        took = seconds_text((end - event.began) / 1e9)
        told = [f"{event.title}: {took}"]
        if event.kind == "call":
            what = f"{event.collective} #{event.call} {event.dtype}, {nbytes_text(event.nbytes)}"
            way = self.say(f"way {event.way}") if event.way else ""
            how = ", ".join(word for word in (event.algorithm, way) if word)
            told.append(f"{what} ({how})" if how else what)
            if event.waited:
                waited = seconds_text(event.waited / 1e9)
                told.append(self.say("waited", time=waited, rank=event.waits_for))
            if event.asked < event.began:
                told.append(self.say("asked", time=seconds_text((event.began - event.asked) / 1e9)))
            if event.site:
                told.append("/".join(event.site.split("/")[-2:]))  # a picture is shown around
        if event.kind == "message":
            told.append(nbytes_text(event.nbytes))
        if event.ended is None:
            told.append(self.say("not ended"))
        if event.failed:
            told.append(self.say("failed"))
        return "\n".join(told)


def _fitting(words: str, room: float) -> str:
    """Return as much of a text as there is room for; a few letters say nothing."""
    most = int(room / CHARACTER)
    if len(words) <= most:
        return words
    return f"{words[: most - 1]}…" if most >= 6 else ""  # noqa: PLR2004


def _text(kind: str, x: float, y: float, words: str) -> str:
    place = f'x="{_n(x)}" y="{_n(y)}"'
    return f'<text class="{kind}" {place}>{escape(printable(words))}</text>'


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
