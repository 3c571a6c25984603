"""A picture as one static SVG: the whole schedule at a glance, time running down."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape, quoteattr

from roundelay.errors import InvalidArgumentError
from roundelay.schedule import Cell
from roundelay.view._lanes import LINE as LINE_BESIDE
from roundelay.view._lanes import Lanes
from roundelay.view._shape import Message, chunk_hues, colour, hues, messages, op_of
from roundelay.view.captions import about, brief, costs, failures, printable
from roundelay.view.phrases import Phrases, wrapped
from roundelay.view.picture import CellView, Frame, Picture

__all__ = ["svg"]

MARGIN, BETWEEN, TITLE = 28.0, 56.0, 62.0
LINE = 19.0  # height of a line of text below the bands
NARROWEST = 660.0
#: The room the lanes of one picture may take, alone and beside another.
ROOM = {1: 1060.0, 2: 860.0}
MOST_FAILURES = 4
SMALLEST_LETTER = 5.5

STYLE = """
.page{fill:#fff}.ink{fill:#1f2328}.soft{fill:#5b6168}.slot{fill:none;stroke:#dcd9d2}
.band{fill:#f6f5f1}.failed{fill:#fdecea}.bad{fill:#b3261e}
.cell{stroke-width:.5}.done{stroke-width:2}.changed{stroke:#1f2328;stroke-width:1.6}
rect.wrong{stroke:#b3261e;stroke-width:3}
.line{fill:none;stroke:#6b7178;stroke-width:1.7}.head{fill:#6b7178}
.copy .line{stroke-dasharray:5 3.5}.mixed .line{stroke-dasharray:12 3 3 3}
.bars{stroke:none}
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
.title{font-size:20px;font-weight:650}.name{font-weight:600;font-size:12px;text-anchor:middle}
.which{font-size:12.5px;font-weight:600}.told{font-size:12px}
.bracket{fill:none;stroke:#8d949b;stroke-width:1.5}
.in{font:10px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;
text-anchor:middle}.letter{text-anchor:middle}
"""
DARK = """
.page{fill:#16181b}.ink{fill:#eceae6}.soft{fill:#a3a8ae}.slot{stroke:#34383d}
.band{fill:#1d2024}.failed{fill:#3a1d1c}.bad{fill:#ff8a80}.changed{stroke:#eceae6}
rect.wrong{stroke:#ff8a80}.bars{stroke:none}.line{stroke:#8d949b}.head{fill:#8d949b}
"""


def svg(pictures: Sequence[Picture]) -> str:
    """Return one picture, or two side by side, as an SVG file for light and dark readers.

    Every message is one arrow, from the cells it reads to the cells it writes. Large schedules
    are drawn in small cells without letters; very large ones show only what each step writes.
    """
    if not 1 <= len(pictures) <= len(ROOM):
        raise InvalidArgumentError(f"svg draws 1 or 2 pictures, not {len(pictures)}.")
    x, height, drawn = MARGIN, 0.0, []
    for picture in pictures:
        lanes = Lanes.of(picture, ROOM[len(pictures)])
        width = max(lanes.width, NARROWEST)
        lines = list(_notes(picture, lanes, width))
        above = _title(_about(picture, width))
        drawn.append(f'<g transform="translate({_n(x)} {_n(MARGIN)})">')
        drawn += [*_bands(picture, lanes), *_foot(picture, lanes, lines, above), "</g>"]
        x += width + BETWEEN
        below = above + lanes.bottom + LINE * (len(lines) + 2.2)
        height = max(height, below + 2 * MARGIN)
    width = x - BETWEEN + MARGIN
    title = printable(Phrases(pictures[0].language).joined([each.title for each in pictures]))
    box = f'width="{_n(width)}" height="{_n(height)}"'
    view = f"0 0 {_n(width)} {_n(height)}"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {box} viewBox="{view}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_style(pictures)}</style>",
        f'<rect class="page" {box} rx="14"/>',
    ]
    return "\n".join([*head, *drawn, "</svg>", ""])


def _style(pictures: Sequence[Picture]) -> str:
    """Return the rules: a class per hue, in plain hex, since not every renderer knows better."""
    used = sorted({_hue(hue) for picture in pictures for hue in chunk_hues(picture)})

    def rules(lightness: float, chroma: float, line: float) -> str:
        return "".join(
            f".h{hue}{{fill:{colour(lightness, chroma, hue)};stroke:{colour(line, 0.13, hue)}}}"
            f".h{hue} .line{{stroke:{colour(line, 0.13, hue)}}}"
            f".h{hue} .head{{fill:{colour(line, 0.13, hue)}}}\n"
            for hue in used
        )

    # Hues first: what marks a cell as changed or wrong must win over its own colour.
    dark = f"@media (prefers-color-scheme:dark){{\n{rules(0.5, 0.1, 0.74)}{DARK}}}"
    return f"\n{rules(0.77, 0.11, 0.53)}{STYLE}{dark}\n"


def _hue(hue: int) -> int:
    return hue // 5 * 5


def _bands(picture: Picture, lanes: Lanes) -> Iterator[str]:
    wide = int(max(lanes.width, NARROWEST) / 11)
    yield _text("title ink", 0, 18, textwrap.shorten(picture.title, wide, placeholder=" …"))
    said = _about(picture, max(lanes.width, NARROWEST))
    yield from (_text("soft", 0, 40 + LINE * row, line) for row, line in enumerate(said))
    yield f'<g transform="translate(0 {_n(_title(said))})">'
    failing = {frame for frame, *_ in failures(picture)}
    wrong = {(frame, rank, chunk) for frame, rank, chunk, _ in failures(picture)}
    for rank, name in enumerate(picture.ranks):
        yield _text("name ink", lanes.middle(rank), lanes.tops[0] - 14, name)
    yield from _hosts(picture, lanes)
    for frame in picture.frames:
        yield from _band(lanes, frame, failed=frame.number in failing)
    colours = [f"h{_hue(hue)}" for hue in chunk_hues(picture)]
    for frame in picture.frames:
        yield from (_arrow(lanes, frame, message, colours) for message in messages(frame.transfers))
        bad = {Cell(rank, chunk) for number, rank, chunk in wrong if number == frame.number}
        yield from _cells(picture, lanes, frame, colours, bad)
    yield "</g>"


def _about(picture: Picture, width: float) -> list[str]:
    return wrapped(about(picture), int(width / 6.6))


def _title(said: list[str]) -> float:
    """Return the height of the title and of what is said under it."""
    return TITLE + LINE * (len(said) - 1)


def _hosts(picture: Picture, lanes: Lanes) -> Iterator[str]:
    """Yield a bracket over the lanes of each host whose ranks stand side by side."""
    for name, ranks in zip(picture.shape.names, picture.shape.hosts, strict=True):
        if ranks != tuple(range(ranks[0], ranks[-1] + 1)):
            continue
        left, right = lanes.left(ranks[0]) + 2, lanes.left(ranks[-1]) + lanes.across - 2
        y = lanes.tops[0] - 32
        yield f'<path class="bracket" d="M{_n(left)} {_n(y + 5)}v-5H{_n(right)}v5"/>'
        yield _text("name soft", (left + right) / 2, y - 5, name)


def _band(lanes: Lanes, frame: Frame, *, failed: bool) -> Iterator[str]:
    """Yield the ground of a band and, left of it, which step this is and what it does."""
    top, y = lanes.tops[frame.number], lanes.beside(frame.number)
    ground = f'<rect class="step {"failed" if failed else "band"}" x="{_n(lanes.left(0) - 10)}" '
    ground += f'y="{_n(top - 6)}" width="{_n(lanes.width - lanes.left(0) + 10)}" '
    yield f'{ground}height="{_n(lanes.block + 12)}" rx="6"/>'
    heads, told = lanes.heads[frame.number], lanes.told[frame.number]
    lines = [("bad which" if failed else "ink which", head) for head in heads]
    lines += [("soft told", words) for words in told]
    for line, (kind, words) in enumerate(lines):
        mark = " ✗" if failed and line == len(heads) - 1 else ""
        yield _text(kind, 0, y + line * LINE_BESIDE, words + mark)


def _arrow(lanes: Lanes, frame: Frame, message: Message, colours: list[str]) -> str:
    src, dst, joined = message
    chunks = [transfer.chunk for transfer in joined]
    x1, y1, x2, y2 = lanes.curve(frame.number, src, dst, chunks)
    kind = f"arrow {op_of(joined)}"
    if len(chunks) == 1:
        kind += f" {colours[chunks[0]]}"
    half = (y2 - y1) * 0.55
    head = 4 if lanes.letters else 2.5
    stop = y2 - 2 * head
    points = ((x1, y1 + half), (x2, stop - half), (x2, stop))
    line = f"M{_n(x1)} {_n(y1)}C" + " ".join(f"{_n(x)} {_n(y)}" for x, y in points)
    tip = f"M{_n(x2 - head)} {_n(stop)}h{_n(2 * head)}L{_n(x2)} {_n(y2 + 1)}z"
    return f'<g class="{kind}"><path class="line" d="{line}"/><path class="head" d="{tip}"/></g>'


def _cells(
    picture: Picture, lanes: Lanes, frame: Frame, colours: list[str], wrong: set[Cell]
) -> Iterator[str]:
    if lanes.letters:
        for rank, mine in enumerate(lanes.slots):
            for chunk in mine:
                if (rank, chunk) not in frame.cells:
                    yield _rect("slot", *lanes.corner(frame.number, rank, chunk), lanes, "")
    shown = frame.changed if lanes.sparse and frame.number else frame.cells
    for cell in sorted(shown):
        view = frame.cells[cell]
        kind = f"cell {colours[cell[1]]}"
        kind += " done" * view.done + " changed" * (cell in frame.changed)
        kind += " wrong" * (cell in wrong)
        x, y = lanes.corner(frame.number, *cell)
        share = len(set(view.ranks)) / len(picture.ranks)
        depth = 1 if view.done else 0.25 if lanes.letters else 0.2 + 0.6 * share
        yield _rect(kind, x, y, lanes, f' fill-opacity="{_n(depth)}"')
        if lanes.letters:
            yield from _inside(picture, lanes, view, x, y, colours[cell[1]], cell[1])


def _inside(
    picture: Picture, lanes: Lanes, view: CellView, x: float, y: float, hue: str, chunk: int
) -> Iterator[str]:
    """Yield the bars, one per contributing rank, and above them the text or the chunk's letter."""
    bars = picture.schedule.collective.reduces and not view.done
    if bars:
        wide = (lanes.cell - 2) / len(picture.ranks)
        drawn = "".join(
            f"M{_n(x + 1 + rank * wide)} {_n(y + lanes.height - 9)}h{_n(wide * 0.85)}v8"
            f"h{_n(-wide * 0.85)}z"
            for rank in sorted(set(view.ranks))
        )
        yield f'<path class="bars {hue}" d="{drawn}"/>'
    middle, base = x + lanes.cell / 2, y + (13 if bars else 17)
    if lanes.texts or lanes.briefs:
        words = view.text if lanes.texts else brief(picture.chunks[chunk], view)
        yield _text("in ink", middle, base, words)
    else:
        name = picture.chunks[chunk]
        size = min(12.0, (lanes.cell - 2) / (0.68 * len(name)))
        if size >= SMALLEST_LETTER:
            yield _text("letter ink", middle, base, name, f' style="font-size:{_n(size)}px"')


def _notes(picture: Picture, lanes: Lanes, width: float) -> Iterator[tuple[str, str]]:
    """Yield the lines below the bands, as class and text: costs, then failures."""
    wide, say = max(40, int(width / 7.2)), Phrases(picture.language)
    line = ""
    for label, amount in costs(picture):
        said = f"{label} {amount}"
        if line and len(line) + len(said) > wide:
            yield "ink", line
            line = ""
        line = f"{line} · {said}" if line else said
    yield "ink", line
    if lanes.sparse:
        yield "soft", say("only written")
    failed = list(failures(picture))
    for frame, _, _, words in failed[:MOST_FAILURES]:
        told = say("failure at", n=frame, words=words)
        yield from (("bad", line) for line in wrapped(told, wide))
    if len(failed) > MOST_FAILURES:
        yield "bad", say("more failures", n=len(failed) - MOST_FAILURES)


def _foot(
    picture: Picture, lanes: Lanes, lines: list[tuple[str, str]], title: float
) -> Iterator[str]:
    y = title + lanes.bottom + 1.8 * LINE
    for kind, line in lines:
        yield _text(kind, 0, y, line)
        y += LINE
    hue = f"h{_hue(hues(1)[0])}"
    y += 0.4 * LINE
    say = Phrases(picture.language)
    for x, op, key in ((0.0, "reduce", "reduce: added"), (152.0, "copy", "copy: replaces")):
        yield (
            f'<g class="{op}"><path class="line" d="M{_n(x)} {_n(y - 4)}h22"/>'
            f'<path class="head" d="M{_n(x + 22)} {_n(y - 8)}v8l8 -4z"/></g>'
        )
        yield _text("soft", x + 38, y, say(key))
    yield f'<rect class="{hue} done" x="305" y="{_n(y - 12)}" width="16" height="15" rx="3"/>'
    yield _text("soft", 328, y, say("finished"))
    if lanes.letters and picture.schedule.collective.reduces:
        yield f'<path class="bars {hue}" d="M402 {_n(y - 11)}h4v14h-4zM410 {_n(y - 11)}h4v14h-4z"/>'
        yield _text("soft", 422, y, say("one bar"))


def _rect(kind: str, x: float, y: float, lanes: Lanes, more: str) -> str:
    corner = ' rx="4"' if lanes.letters else ""
    return (
        f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(lanes.cell)}" '
        f'height="{_n(lanes.height)}"{corner}{more}/>'
    )


def _text(kind: str, x: float, y: float, words: str, more: str = "") -> str:
    place = f'x="{_n(x)}" y="{_n(y)}"{more}'
    return f"<text class={quoteattr(kind)} {place}>{escape(printable(words))}</text>"


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
