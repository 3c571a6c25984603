"""Attention over ranks as a drawing: a square for each step, side by side; and as a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from roundelay.errors import InvalidArgumentError
from roundelay.view._shape import colour, hues
from roundelay.view.attention import AttentionFrame, AttentionPicture
from roundelay.view.phrases import wrapped

__all__ = ["attention_frames", "attention_html", "attention_svg"]

SIDE = 190.0  # of the grid in a panel
LEFT, TOP, GAP, MARGIN = 46.0, 66.0, 26.0, 28.0
ACROSS = 4  # panels in a row
PANEL = LEFT + SIDE + GAP
LINE = 18.0
SMALL, SMALLEST = 14.0, 10.0  # of a cell that has a small number in it, and one at all
LETTER = 6.4  # how wide a letter of a name is, at most

STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;fill:#1f2328}
.title{font-size:19px;font-weight:650}.head{font-size:14px;font-weight:600}.soft{fill:#5b6168}
.page{fill:#fff}.empty{fill:#f6f5f1;stroke:#dcd9d2}.hidden{fill:#ece9e2;stroke:#dcd9d2}
.num{text-anchor:middle;font-weight:600}.side{text-anchor:end;font-size:11px}
.above{text-anchor:middle;font-size:11px}.tiny{font-size:8px}
"""
DARK = """
text{fill:#eceae6}.soft{fill:#a3a8ae}.page{fill:#16181b}.empty{fill:#1d2024;stroke:#34383d}
.hidden{fill:#2a2d31;stroke:#34383d}
"""
PAGE_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;max-width:44rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.3rem}.step{display:none}svg{max-width:100%;height:auto}
input{margin:0 .3rem 0 1rem}
"""


def attention_svg(pictures: Sequence[AttentionPicture]) -> str:
    """Return the pictures, one below the other, for light and dark readers."""
    if not pictures:
        raise InvalidArgumentError("attention_svg draws a picture at least.")
    parts, y = list[str](), MARGIN
    width = 2 * MARGIN + PANEL * min(ACROSS, max(len(each.frames) for each in pictures)) - GAP
    for picture in pictures:
        parts.append(_text("title", MARGIN, y + 14, picture.title))
        y += 20
        for words in wrapped(_about(picture), int((width - 2 * MARGIN) / 6)):
            y += LINE
            parts.append(_text("soft", MARGIN, y, words))
        y += 12
        for at, frame in enumerate(picture.frames):
            x = MARGIN + PANEL * (at % ACROSS)
            parts += _panel(picture, frame, x, y + (at // ACROSS) * _height(picture))
        y += _height(picture) * -(-len(picture.frames) // ACROSS)
        for words in wrapped(picture.ending, int((width - 2 * MARGIN) / 6)):
            parts.append(_text("soft", MARGIN, y, words))
            y += LINE
        y += 24
    size = max(each.size for each in pictures)
    return _framed(parts, size, width, y, " and ".join(each.title for each in pictures))


def attention_html(picture: AttentionPicture) -> str:
    """Return a page that steps through a picture, by choosing; it has no script."""
    count = len(picture.frames)
    shown = "".join(
        f"#s{at}:checked~#p{at}{{display:block}}" for at in range(count)
    )  # a step is shown while its button is chosen
    buttons = "".join(
        f'<input type="radio" name="step" id="s{at}"{" checked" if at == 0 else ""}>'
        f'<label for="s{at}">{escape(frame.head)}</label>'
        for at, frame in enumerate(picture.frames)
    )
    drawn = attention_frames(picture)
    steps = "".join(f'<div class="step" id="p{at}">{svg}</div>' for at, svg in enumerate(drawn))
    title = escape(picture.title)
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html>\n<html lang="{picture.language}"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{PAGE_STYLE}{shown}</style></head>\n<body>"
        f"<h1>{title}</h1><p>{escape(_about(picture))}</p><form>{buttons}{steps}</form>"
        f"<p>{escape(picture.ending)}</p></body></html>\n"
    )


def attention_frames(picture: AttentionPicture) -> list[str]:
    """Return a drawing for each step."""
    return [
        _framed([*_panel(picture, frame, MARGIN, 0)], picture.size, PANEL + 4 * MARGIN,
                _height(picture), f"{picture.title}: {frame.head}", doubled=True)
        for frame in picture.frames
    ]  # fmt: skip


def _framed(
    parts: Sequence[str],
    size: int,
    width: float,
    height: float,
    title: str,
    *,
    doubled: bool = False,
) -> str:
    times = 2 if doubled else 1
    box = f'viewBox="0 0 {_n(width)} {_n(height)}"'
    seen = f'width="{_n(width * times)}" height="{_n(height * times)}" {box}'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {seen}>',
        f"<title>{escape(title)}</title><style>{_rules(size)}</style>",
        f'<rect class="page" width="{_n(width)}" height="{_n(height)}" rx="14"/>',
        *parts, "</svg>", "",
    ])  # fmt: skip


def _rules(size: int) -> str:
    """Return a class for every rank's colour, as it is and faded."""

    def ranks(lightness: float, chroma: float, faded: float, pale: float) -> str:
        return "".join(
            f".r{rank}{{fill:{colour(lightness, chroma, hue)}}}"
            f".f{rank}{{fill:{colour(faded, pale, hue)}}}"
            for rank, hue in enumerate(hues(size))
        )

    dark = f"@media (prefers-color-scheme:dark){{{DARK}{ranks(0.5, 0.12, 0.3, 0.04)}}}"
    return f"{STYLE}{ranks(0.77, 0.12, 0.95, 0.025)}{dark}"


def _height(picture: AttentionPicture) -> float:
    return TOP + SIDE / len(picture.columns) * len(picture.rows) + 2 * GAP


def _about(picture: AttentionPicture) -> str:
    """Return what the picture says of itself, where cells have no room for numbers, too."""
    if SIDE / len(picture.columns) >= SMALLEST:
        return picture.about
    return picture.about.replace("the number and colour", "the colour").replace(
        "编号和颜色", "颜色"
    )


def _panel(picture: AttentionPicture, frame: AttentionFrame, x: float, y: float) -> Iterator[str]:
    """Yield one step: what it is, names of rows and columns, and the grid."""
    cell = SIDE / len(picture.columns)
    yield _text("head", x, y + 16, frame.head)
    for number, words in enumerate(frame.told):
        yield _text("soft", x, y + 32 + 14 * number, words)
    top, left = y + TOP + 6, x + LEFT
    apart = math.ceil(LETTER * (1 + max(map(len, picture.columns))) / cell)  # or they overlap
    for column, name in enumerate(picture.columns):
        if column % apart:
            continue
        yield _text("above", left + cell * (column + 0.5), top - 4, name)
    for row, name in enumerate(picture.rows):
        owner, middle = picture.owners[row], top + cell * (row + 0.5)
        if owner is not None:
            yield (f'<rect class="r{owner}" x="{_n(left - 8)}" y="{_n(top + cell * row + 1)}" '
                   f'width="4" height="{_n(cell - 2)}"/>')  # fmt: skip
        yield _text("side", left - 12, middle + 4, name)
        for column in range(len(picture.columns)):
            yield from _cell(picture, frame, (row, column), (left, top, cell))


def _cell(
    picture: AttentionPicture,
    frame: AttentionFrame,
    place: tuple[int, int],
    grid: tuple[float, float, float],
) -> Iterator[str]:
    left, top, side = grid
    x, y = left + side * place[1], top + side * place[0]
    ground = "hidden" if place in picture.hidden else "empty"
    yield f'<rect class="{ground}" x="{_n(x)}" y="{_n(y)}" width="{_n(side)}" height="{_n(side)}"/>'
    rank = frame.now.get(place, frame.past.get(place))
    if rank is None:
        return
    kind = f"{'r' if place in frame.now else 'f'}{rank}"
    near, far = 1.0, side - 1.0
    shape = f"M{_n(x + near)} {_n(y + near)}V{_n(y + far)}H{_n(x + far)}"
    shape += "z" if place in picture.halves else f"V{_n(y + near)}z"
    yield f'<path class="{kind}" d="{shape}"/>'
    if place in frame.now and side >= SMALLEST:
        at = (0.33, 0.67) if place in picture.halves else (0.5, 0.5)
        kind, low = ("num", 4) if side >= SMALL else ("num tiny", 3)
        yield _text(kind, x + side * at[0], y + side * at[1] + low, str(rank))


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}">{escape(words)}</text>'


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
