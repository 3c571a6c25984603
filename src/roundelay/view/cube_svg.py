"""A cut matrix product as one SVG: the cube, and for each product who has what and what moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from roundelay.contraction import TENSORS
from roundelay.language import say
from roundelay.view._cuboid import Box, Corner, Cuboid
from roundelay.view._shape import colour, hues
from roundelay.view.cube import DIM_NAMES, CubeFrame, CubePicture, TensorSheet, listed, shape_text
from roundelay.view.phrases import wrapped
from roundelay.view.terminal_text import nbytes_text

__all__ = ["CUBE_STYLE", "cube_drawing", "cube_style", "cube_svg"]

MARGIN, TOP, LINE = 28.0, 74.0, 19.0
CUBE = (318.0, 410.0)  # room for the cube
PANELS = 470.0  # where the products begin
PANEL = 162.0  # height of one
SHEET = (138.0, 90.0)
STEP = 182.0  # from sheet to sheet
BADGE = PANELS + 3 * STEP - 12
WIDTH = BADGE + 226.0
MOST_ROWS = 16
MOST_GROUPS = 3
SMALLEST = 9.0  # tiles that are thinner have no text
GRID_CELLS = 16

CUBE_STYLE = """
.page{fill:#fff}.ink{fill:#1f2328}.soft{fill:#5b6168}.accent{fill:#c2410c}.good{fill:#1a7f37}
.bad{fill:#b3261e}.band{fill:#f6f5f1}.moving{fill:#fff1e6;stroke:#e8a06a}
.cell{stroke:#fff;stroke-width:1.2}.grid{fill:none;stroke:#fff;stroke-opacity:.45;stroke-width:.7}
.pill{fill:#fff;fill-opacity:.86}.link{stroke:#c2410c;stroke-width:2.4;fill:none}
.tip{fill:#c2410c}.edge{fill:none;stroke:#8d949b}.edge.cut{stroke:#c2410c;stroke-width:1.8}
.front{fill-opacity:1}.side{fill-opacity:.82}.top{fill-opacity:.58}.under{fill:#fff}
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
.title{font-size:20px;font-weight:650}.name{font-weight:650}.mid{text-anchor:middle}
.end{text-anchor:end}.small{font-size:11.5px}.big{font-size:14.5px;font-weight:650}
.code{font:12px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
"""
DARK = """
.page{fill:#16181b}.ink{fill:#eceae6}.soft{fill:#a3a8ae}.accent{fill:#ffa657}.good{fill:#56d364}
.bad{fill:#ff8a80}.band{fill:#1d2024}.moving{fill:#3a2718;stroke:#8a5a2b}
.cell{stroke:#16181b}.grid{stroke:#16181b}.under{fill:#16181b}
.pill{fill:#16181b;fill-opacity:.8}.link{stroke:#ffa657}.tip{fill:#ffa657}.edge.cut{stroke:#ffa657}
"""


def cube_svg(picture: CubePicture) -> str:
    """Return the picture as an SVG file for light and dark readers."""
    height, parts = cube_drawing(picture)
    box = f'width="{_n(WIDTH)}" height="{_n(height)}"'
    view = f"0 0 {_n(WIDTH)} {_n(height)}"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {box} viewBox="{view}">',
        f"<title>{escape(picture.title)}</title>",
        f"<style>{cube_style(picture)}</style>",
        f'<rect class="page" {box} rx="14"/>',
        _text("title ink", MARGIN, 44, picture.title),
        _text("soft", MARGIN, 66, picture.about),
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def cube_style(picture: CubePicture) -> str:
    """Return the rules: a class per rank, in plain hex, since not every renderer knows better."""
    ranks = enumerate(hues(picture.cube.size))
    light, dark = zip(
        *(
            (
                f".r{rank}{{fill:{colour(0.74, 0.13, hue)}}}",
                f".r{rank}{{fill:{colour(0.6, 0.12, hue)}}}",
            )
            for rank, hue in ranks
        ),
        strict=True,
    )
    query = "@media (prefers-color-scheme:dark)"
    return f"\n{''.join(light)}{CUBE_STYLE}{query}{{\n{''.join(dark)}{DARK}}}\n"


def cube_drawing(picture: CubePicture) -> tuple[float, list[str]]:
    """Return the height, and all of the picture but its title: `frame` classes mark products."""
    body = TOP + 3 * PANEL + 24
    table = list(_holdings(picture, body))
    height = body + LINE * (min(picture.cube.size, MOST_ROWS) + 3.4) + MARGIN
    parts = [f"<defs>{''.join(_patterns(picture))}</defs>", *_cuboid(picture)]
    for number, frame in enumerate(picture.frames, start=1):
        y = TOP + 14 + (number - 1) * PANEL
        parts += [f'<g class="frame" data-frame="{number}">', *_panel(picture, frame, y), "</g>"]
    verdict = "good name" if picture.agrees else "bad name"
    sign = "✓" if picture.agrees else "✗"
    parts += [*table, _text(verdict, MARGIN, height - MARGIN, f"{sign} {picture.verdict}")]
    return height, parts


def _cuboid(picture: CubePicture) -> Iterator[str]:
    """Yield the boxes, and what stands around them: the three faces, and the lengths of edges."""
    drawn = Cuboid(picture.cube, CUBE)
    x, y = MARGIN + 22, TOP + 24 + (CUBE[1] - 40 - drawn.height) / 2 + 16
    yield f'<g transform="translate({_n(x)} {_n(y)})">'
    for box in drawn.boxes():
        yield from _box(drawn, box)
    yield from _edges(picture, drawn)
    yield "</g>"


def _box(drawn: Cuboid, box: Box) -> Iterator[str]:
    (left, right), (top, bottom), (near, far) = box.across, box.down, box.deep
    o, rows, h = box.cells
    corner, foot = (left, top, near), (left, bottom, near)
    faces = {
        "top": ([corner, (right, top, near), (right, top, far), (left, top, far)], o, h),
        "side": ([corner, (left, top, far), (left, bottom, far), foot], h, rows),
        "front": (
            [corner, (right, top, near), (right, bottom, near), (left, bottom, near)],
            o,
            rows,
        ),
    }
    for face, (corners, across, down) in faces.items():
        places = [drawn.at(*corner) for corner in corners]
        line = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in places) + "z"
        yield f'<path class="under" d="{line}"/>'
        yield f'<path class="cell {face} r{box.rank}" d="{line}"/>'
        if max(across, down) <= GRID_CELLS:
            yield f'<path class="grid" d="{_grid(places, across, down)}"/>'
    x, y = drawn.at((left + right) / 2, (top + bottom) / 2, near)
    if (bottom - top) * drawn.scale >= SMALLEST:
        yield _text("mid name ink", x, y + 4.5, str(box.rank))


def _grid(corners: Sequence[Corner], across: int, down: int) -> str:
    """Return the lines between the cells of a face."""
    a, b, c, d = corners

    def between(one: Corner, other: Corner, share: float) -> Corner:
        return one[0] + (other[0] - one[0]) * share, one[1] + (other[1] - one[1]) * share

    ends = [(between(a, b, at / across), between(d, c, at / across)) for at in range(1, across)]
    ends += [(between(a, d, at / down), between(b, c, at / down)) for at in range(1, down)]
    return "".join(f"M{_n(p)} {_n(q)}L{_n(r)} {_n(s)}" for (p, q), (r, s) in ends)


def _edges(picture: CubePicture, drawn: Cuboid) -> Iterator[str]:
    """Yield a line with the length of every edge, and the names of the three faces in sight."""
    across, down, deep = drawn.extent
    out = 12 / drawn.scale
    (x, y), (x2, _) = drawn.at(0, down + out, 0), drawn.at(across, down + out, 0)
    yield from _edge(picture, "o", (x, y), (x2, y), ((x + x2) / 2, y + 17, "mid"))
    (x, y), (_, y2) = drawn.at(across + out, 0, 0), drawn.at(across + out, down, 0)
    yield from _edge(picture, "bs", (x, y), (x, y2), (x + 7, (y + y2) / 2 + 4, ""))
    (x, y), (x2, y2) = drawn.at(across + out, 0, 0), drawn.at(across + out, 0, deep)
    yield from _edge(picture, "h", (x, y), (x2, y2), ((x + x2) / 2 + 14, (y + y2) / 2 - 14, ""))
    x, y = drawn.at(0, 0, deep)
    yield _text(
        "big ink mid",
        *_moved(drawn.at(across / 2, 0, deep), 0, -10),
        say(picture.language, "W and dW: the top", "W 与 dW：顶面"),
    )
    bottom = drawn.at(0, down, 0)
    side = say(picture.language, "X and dX: the side", "X 与 dX：侧面")
    below = 52 + LINE * (len(picture.cube.pieces("o")) > 1)
    front = _moved(drawn.at(across / 2, down, 0), 0, below)
    yield _text(
        "big ink mid", *front, say(picture.language, "Y and dY: the front", "Y 与 dY：正面")
    )
    yield (
        f'<text class="big ink mid" transform="translate({_n(x - 12)} '
        f'{_n((y + bottom[1]) / 2 - 20)}) rotate(-90)">{side}</text>'
    )


def _edge(
    picture: CubePicture, letters: str, start: Corner, end: Corner, words: tuple[float, float, str]
) -> Iterator[str]:
    cube = picture.cube
    parts = []
    for letter in letters:
        pieces = len(cube.pieces(letter))
        parts.append((f"{letter}={cube.lengths[letter]}", pieces > 1))
        parts += (
            [(say(picture.language, f"cut in {pieces}", f"切成 {pieces} 份"), True)]
            if pieces > 1
            else []
        )
    cut = any(len(cube.pieces(letter)) > 1 for letter in letters)
    yield (
        f'<path class="edge{" cut" * cut}" '
        f'd="M{_n(start[0])} {_n(start[1])}L{_n(end[0])} {_n(end[1])}"/>'
    )
    x, y, anchor = words
    y -= 0 if anchor else LINE / 2 * (len(parts) - 1)
    for line, (part, accented) in enumerate(parts):
        kind = "accent name" if accented else "soft"
        yield _text(f"{kind} {anchor}", x, y + line * LINE, part)


def _moved(corner: Corner, x: float, y: float) -> Corner:
    return corner[0] + x, corner[1] + y


def _panel(picture: CubePicture, frame: CubeFrame, y: float) -> Iterator[str]:
    """Yield one product: factors, result, and what moves."""
    moving = "moving" if frame.groups else "band"
    yield (
        f'<rect class="{moving}" x="{_n(PANELS - 14)}" y="{_n(y)}" '
        f'width="{_n(WIDTH - PANELS + 14 - MARGIN)}" height="{_n(PANEL - 12)}" rx="9"/>'
    )
    yield _text("big ink", PANELS, y + 22, frame.title)
    for at, (sheet, sign) in enumerate(zip(frame.sheets, "·= ", strict=True)):
        x = PANELS + at * STEP
        yield from _sheet(picture, sheet, x, y + 34)
        yield _text("big ink mid", x + SHEET[0] + (STEP - SHEET[0]) / 2, y + 84, sign.strip())
    kind = "accent" if frame.groups else "good"
    yield _text(f"{kind} big", BADGE, y + 22, frame.head)
    some = len(frame.groups) > MOST_GROUPS  # and the line that says so takes the room of one
    top = y + (54 if some else 42)
    for group in frame.groups[: MOST_GROUPS - some]:
        yield from _group(group, BADGE + 9, top)
        top += 22
    if some:
        count = len(frame.groups)
        words = say(picture.language, f"in {count} groups, such as", f"共 {count} 组，例如")
        yield _text("soft small", BADGE, y + 38, words)
        top += 2
    for line, word in enumerate(wrapped(frame.why, 33)):
        yield _text("soft small", BADGE, top + 4 + 14 * line, word)


def _group(group: Sequence[int], x: float, y: float) -> Iterator[str]:
    """Yield the ranks of a group as dots, with arrows to and fro between them."""
    shown = list(group) if len(group) <= 6 else [*group[:4], -1, group[-1]]  # noqa: PLR2004
    for at in range(len(shown) - 1):
        left, right = x + 34 * at + 10, x + 34 * (at + 1) - 10
        yield f'<path class="link" d="M{_n(left + 4)} {_n(y)}H{_n(right - 4)}"/>'
        for tip, way in ((left, 1), (right, -1)):
            yield f'<path class="tip" d="M{_n(tip)} {_n(y)}l{5 * way} -3.6v7.2z"/>'
    for at, rank in enumerate(shown):
        if rank < 0:
            yield _text("mid ink", x + 34 * at, y + 4, "…")
            continue
        yield f'<circle class="r{rank}" cx="{_n(x + 34 * at)}" cy="{_n(y)}" r="9"/>'
        yield _text("mid ink small name", x + 34 * at, y + 4, str(rank))


def _sheet(picture: CubePicture, sheet: TensorSheet, x: float, y: float) -> Iterator[str]:
    """Yield a tensor as a field of tiles: one colour is one rank, stripes are a copy on each."""
    wide, high = SHEET
    count, rows = len(sheet.columns), len(sheet.rows)
    for row, tiles in enumerate(sheet.tiles):
        for column, ranks in enumerate(tiles):
            place = (x + wide * column / count, y + high * row / rows)
            size = (wide / count, high / rows)
            yield (
                f'<rect class="cell{_kind(ranks)}" x="{_n(place[0])}" y="{_n(place[1])}" '
                f'width="{_n(size[0])}" height="{_n(size[1])}" rx="3"{_filled(ranks)}/>'
            )
            words = listed(ranks, sheet.sign)
            room = 7.2 * len(words) + 8
            if size[1] >= SMALLEST + 2 and size[0] >= room - 6:
                yield from _pill(words, place[0] + size[0] / 2, place[1] + size[1] / 2, room, sheet)
    each = count * rows > 1
    pieces = say(picture.language, "each" if each else "whole", "每片" if each else "完整")
    shape = shape_text(sheet.shape)
    yield _text("ink small", x, y + high + 16, f"{sheet.name}: {shape} {pieces}")


def _kind(ranks: Sequence[int]) -> str:
    return f" r{ranks[0]}" if len(ranks) == 1 else ""


def _filled(ranks: Sequence[int]) -> str:
    return "" if len(ranks) == 1 else f' fill="url(#{_stripes(ranks)})"'


def _pill(words: str, x: float, y: float, room: float, sheet: TensorSheet) -> Iterator[str]:
    if not words.isdigit():
        yield (
            f'<rect class="pill" x="{_n(x - room / 2)}" y="{_n(y - 8.5)}" width="{_n(room)}" '
            f'height="17" rx="8"/>'
        )
    yield _text(f"mid name small {'accent' if sheet.summed else 'ink'}", x, y + 4, words)


def _stripes(ranks: Sequence[int]) -> str:
    return "on-" + "-".join(map(str, ranks))


def _patterns(picture: CubePicture) -> Iterator[str]:
    """Yield stripes in the colours of each group of ranks that has the same piece."""
    sets = {
        tuple(ranks)
        for tensor in TENSORS
        for _, ranks in picture.cube.owners(tensor)
        if len(ranks) > 1
    }
    for ranks in sorted(sets):
        wide = 7 * len(ranks)
        bars = "".join(
            f'<rect class="r{rank}" x="{7 * at}" y="0" width="7.2" height="{wide}"/>'
            for at, rank in enumerate(ranks)
        )
        yield (
            f'<pattern id="{_stripes(ranks)}" width="{wide}" height="{wide}" '
            f'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">{bars}</pattern>'
        )


def _holdings(picture: CubePicture, y: float) -> Iterator[str]:
    """Yield the table below: what each rank has, and what it sends."""
    cube, run = picture.cube, picture.run
    language = picture.language
    heads = ["rank", *(say(language, cut.dim, DIM_NAMES.get(cut.dim, "")) for cut in cube.cuts),
             "X, dX", "W, dW", "Y, dY", say(language, "sends", "发送")]  # fmt: skip
    places = [MARGIN, *(MARGIN + 70 + 96 * at for at in range(len(heads) - 1))]
    for at in range(1 + len(cube.cuts), len(heads)):
        places[at] = MARGIN + 70 + 96 * len(cube.cuts) + 170 * (at - 1 - len(cube.cuts))
    yield from (
        _text("soft small", x, y + LINE, head) for x, head in zip(places, heads, strict=True)
    )
    for rank, place in enumerate(cube.places()[:MOST_ROWS]):
        cells = [
            f"{shape_text(run.shapes[rank][name])}, {nbytes_text(run.nbytes[rank][name])}"
            for name in ("X", "W", "Y")
        ]
        sent = sum(each.sent[rank] for each in run.products.values())
        words = [
            str(rank),
            *map(str, place),
            *cells,
            nbytes_text(sent) if sent else say(language, "nothing", "无"),
        ]
        line = y + LINE * (rank + 2)
        yield f'<circle class="r{rank}" cx="{_n(MARGIN + 28)}" cy="{_n(line - 4.5)}" r="6"/>'
        yield from (_text("code ink", x, line, word) for x, word in zip(places, words, strict=True))


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}">{escape(words)}</text>'


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
