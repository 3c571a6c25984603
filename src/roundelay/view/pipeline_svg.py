"""A pipeline's timeline as SVG, and as a page around it; both for light and dark readers."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from xml.sax.saxutils import escape

from roundelay.language import say
from roundelay.view._shape import colour
from roundelay.view.captions import printable
from roundelay.view.pipeline_picture import PipelineBox, PipelinePicture
from roundelay.view.terminal_text import three_digits

__all__ = ["pipeline_html", "pipeline_svg"]

MARGIN, TOP, ROW, BOX, LINE = 28.0, 92.0, 38.0, 28.0, 20.0
LEFT, KEEPS = 128.0, 96.0
TIMELINE = 900.0
LETTER_ROOM = 19.0  # a box this wide says its letter, too
NUMBER_ROOM = 8.0
TICKS = 12
MOST_TRACED = 64  # micro-batches that are followed by the pointer
MOST_SQUARES = 12
HUES = {"F": 250, "B": 160, "W": 70}
SHADES = 4  # stages of a rank that are told apart

HATCH = (
    '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="hatch" d="M0 0V6" stroke-width="2"/></pattern>'
    "</defs>"
)
STYLE = """
.page{fill:#fff}.ink{fill:#1f2328}.soft{fill:#5b6168}.idle{fill:url(#idle)}
.lane{fill:#f6f5f1}.hatch{stroke:#d5d1c7}.tick{stroke:#dcd9d2}.kept{fill:#8d949b}
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
.title{font-size:20px;font-weight:650}.name{font-weight:600}.in{font-size:11.5px;text-anchor:middle;
pointer-events:none}.at{font-size:11px;text-anchor:middle}.box{stroke-width:1}
"""
DARK = """
.page{fill:#16181b}.ink{fill:#eceae6}.soft{fill:#a3a8ae}.lane{fill:#1d2024}.hatch{stroke:#3a3f45}
.tick{stroke:#34383d}.kept{fill:#777e86}
"""
PAGE = """
:root{color-scheme:light dark;--page:#faf9f6;--ink:#1f2328;--soft:#5b6168;--hair:#e2dfd8}
@media (prefers-color-scheme:dark){
:root{--page:#131518;--ink:#eceae6;--soft:#a3a8ae;--hair:#2f3338}}
body{margin:0 auto;max-width:1240px;padding:28px 32px 40px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;
font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}.scroll svg{display:block;max-width:100%;height:auto}
table{border-collapse:collapse;margin-top:20px}
th,td{padding:5px 18px 5px 0;text-align:right;border-bottom:1px solid var(--hair)}
th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}
th{font-weight:600}p{color:var(--soft)}
"""


def pipeline_svg(picture: PipelinePicture) -> str:
    """Return the timeline; a pointer over a box shows where its micro-batch goes."""
    return _svg(picture, _style(picture))


def _svg(picture: PipelinePicture, style: str) -> str:
    scale = TIMELINE / (picture.price.makespan or 1.0)
    bottom = TOP + ROW * len(picture.rows)
    width = 2 * MARGIN + LEFT + TIMELINE + KEEPS
    height = bottom + 58 + LINE * len(picture.notes) + 34
    box = f'width="{_n(width)}" height="{_n(height)}"'
    view = f'viewBox="0 0 {_n(width)} {_n(height)}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {box} {view}>',
        f"<title>{escape(printable(picture.title))}</title>",
        f"<style>{style}</style>",
        HATCH,
        f'<rect class="page" {box} rx="14"/>',
        _text("title ink", MARGIN, 46, picture.title),
    ]
    body = [
        *_axis(picture, scale, bottom),
        *(part for rank in range(len(picture.rows)) for part in _row(picture, rank, scale)),
        *_legend(picture, bottom + 52, scale),
    ]
    for number, note in enumerate(picture.notes):
        body.append(_text("ink", MARGIN, bottom + 84 + LINE * number, note))
    return "\n".join([*head, *body, "</svg>", ""])


def _style(picture: PipelinePicture) -> str:
    def rules(lightness: float, chroma: float, line: float) -> str:
        return "".join(
            f".{letter}{shade}{{fill:{colour(lightness - 0.07 * shade, chroma, hue)};"
            f"stroke:{colour(line, 0.1, hue)}}}"
            for letter, hue in HUES.items()
            for shade in range(SHADES)
        )

    # What stands behind the box under the pointer steps back, all but its own micro-batch.
    traced = "".join(
        f"svg:has(.m{number}:hover) .box:not(.m{number}){{opacity:.25}}"
        for number in range(min(picture.schedule.micro_batches, MOST_TRACED))
    )
    dark = f"@media (prefers-color-scheme:dark){{{rules(0.52, 0.1, 0.75)}{DARK}}}"
    return f"\n{rules(0.82, 0.1, 0.55)}{STYLE}{dark}{traced}\n"


def _row(picture: PipelinePicture, rank: int, scale: float) -> Iterator[str]:
    y = TOP + ROW * rank
    x = MARGIN + LEFT
    yield _text("name ink", MARGIN, y + 13, picture.names[rank])
    yield _text("soft", MARGIN, y + 28, picture.stages_text(rank))
    lane = f'x="{_n(x)}" y="{_n(y)}" width="{_n(TIMELINE)}" height="{_n(BOX)}"'
    yield f'<rect class="lane" {lane} rx="3"/><rect class="idle" {lane} rx="3"/>'
    for box in picture.rows[rank]:
        yield from _box(box, x + box.start * scale, y, (box.end - box.start) * scale)
    squares = max(picture.peaks) <= MOST_SQUARES  # for every rank or for none
    yield from _kept(picture.peaks[rank], x + TIMELINE + 14, y, squares=squares)


def _box(box: PipelineBox, x: float, y: float, width: float) -> Iterator[str]:
    kind = f"box {box.letter}{min(box.local, SHADES - 1)} m{box.micro_batch}"
    yield (
        f'<rect class="{kind}" x="{_n(x + 0.5)}" y="{_n(y)}" width="{_n(max(width - 1, 0.5))}" '
        f'height="{_n(BOX)}" rx="3"><title>{escape(box.words)}</title></rect>'
    )
    words = _words(box, width)
    if words:
        yield _text("in ink", x + width / 2, y + BOX / 2 + 4, words)


def _words(box: PipelineBox, width: float) -> str:
    """Return what a box of this width has room for."""
    digits = str(box.micro_batch)
    if width >= LETTER_ROOM + 6 * (len(digits) - 1):
        return box.letter + digits
    return digits if width >= NUMBER_ROOM * len(digits) else ""


def _kept(peak: int, x: float, y: float, *, squares: bool) -> Iterator[str]:
    """Yield a square for each activation that a rank keeps, and their number."""
    above = 6 if peak <= 8 else 1  # noqa: PLR2004 - two rows, or three
    for number in range(peak if squares else 0):
        left, top = x + 9 * (number % 4), y + above + 9 * (number // 4)
        yield f'<rect class="kept" x="{_n(left)}" y="{_n(top)}" width="7" height="7" rx="1.5"/>'
    yield _text("soft", x + (42 if squares else 0), y + 18, str(peak))


def _axis(picture: PipelinePicture, scale: float, bottom: float) -> Iterator[str]:
    x = MARGIN + LEFT
    step = max(1, round(picture.price.makespan / TICKS))
    at = 0.0
    while at <= picture.price.makespan + 1e-9:
        place = x + at * scale
        yield f'<path class="tick" d="M{_n(place)} {_n(TOP - 6)}V{_n(bottom)}"/>'
        yield _text("at soft", place, bottom + 12, three_digits(at))
        at += step
    yield _text("soft", x + TIMELINE + 14, TOP - 14,
                say(picture.language, "keeps at most", "最多保留"))  # fmt: skip


def _legend(picture: PipelinePicture, y: float, scale: float) -> Iterator[str]:
    x = MARGIN
    language = picture.language
    for letter, meaning in picture.meanings().items():
        place = f'x="{_n(x)}" y="{_n(y - 13)}" width="26" height="17" rx="3"'
        yield f'<rect class="{letter}0" {place}/>'
        yield _text("in ink", x + 13, y, f"{letter}0")
        words = meaning
        if letter == "F":
            words = say(language, f"{meaning} of micro-batch 0", f"微批 0 的{meaning}")
        yield _text("soft", x + 34, y, words)
        x += 60 + (7.2 if language == "en" else 13) * len(words)
    idle = f'x="{_n(x)}" y="{_n(y - 13)}" width="26" height="17" rx="3"'
    yield f'<rect class="lane" {idle}/><rect class="idle" {idle}/>'
    more, placement = "", picture.schedule.placement
    if len(set(placement)) < len(placement):
        more = say(language, "; darker: later stages of a rank", "；颜色更深：该 rank 靠后的阶段")
    if any(_words(box, (box.end - box.start) * scale) == str(box.micro_batch)
           for row in picture.rows for box in row):  # fmt: skip
        more += say(language, "; narrow boxes have the number alone", "；窄框只写编号")
    yield _text("soft", x + 34, y, say(language, "waits: the bubble", "等待：气泡") + more)


def _text(kind: str, x: float, y: float, words: str) -> str:
    place = f'x="{_n(x)}" y="{_n(y)}"'
    return f'<text class="{kind}" {place}>{escape(printable(words))}</text>'


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def pipeline_html(picture: PipelinePicture) -> str:
    """Return a page with the timeline and a table of its ranks; it has no script."""
    style = _style(picture)
    policy = f"default-src 'none'; style-src '{_digest(style)}' '{_digest(PAGE)}'"
    title = escape(printable(picture.title))
    busy = picture.price.busy
    rows = "".join(
        f"<tr><td>{escape(printable(name))}</td><td>{picture.stages_text(rank)}</td>"
        f"<td>{three_digits(busy[rank])}</td>"
        f"<td>{three_digits(picture.price.makespan - busy[rank])}</td>"
        f"<td>{picture.peaks[rank]}</td></tr>"
        for rank, name in enumerate(picture.names)
    )
    hint = say(
        picture.language,
        "Point at a box: its micro-batch stays, and all others step back.",
        "指向一个框：它的微批保持原样，其余淡出。",
    )
    columns = say(picture.language, "rank|has|works|waits|keeps at most",
                  "rank|拥有|工作|等待|最多保留")  # fmt: skip
    heads = "".join(f"<th>{name}</th>" for name in columns.split("|"))
    return f"""<!doctype html>
<html lang="{picture.language}"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width"><title>{title}</title>
<style>{PAGE}</style></head><body>
<div class="scroll">{_svg(picture, style)}</div>
<p>{hint}</p>
<table><thead><tr>{heads}</tr>
</thead><tbody>{rows}</tbody></table>
</body></html>
"""


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
