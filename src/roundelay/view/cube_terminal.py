"""A cut matrix product as text: for each product, who has which piece, and what moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from roundelay.contraction import TENSORS
from roundelay.language import Language, say
from roundelay.view.cube import DIM_NAMES, CubeFrame, CubePicture, TensorSheet, listed, shape_text
from roundelay.view.terminal_text import ASCII, UNICODE, Glyphs, nbytes_text

__all__ = ["cube_text"]

#: The lines of a sheet: horizontal, vertical, then corners and crossings row by row.
LINES = {UNICODE: "─│┌┬┐├┼┤└┴┘", ASCII: "-|+++++++++"}
SPELLED = str.maketrans({"Σ": "Sum", "ₕ": "_h", "·": "*", "ᵀ": "^T", "…": "..", "\u00d7": "x"})
MOST_PIECES = 8  # of a dim; of more, the first and the last are drawn


def cube_text(picture: CubePicture, *, ascii_only: bool = False) -> RenderableType:
    """Return the whole picture: the cut, a frame for each product, what each rank holds."""
    glyphs = ASCII if ascii_only else UNICODE
    parts: list[RenderableType] = [
        Text(_plain(picture.title, glyphs), style="bold"),
        Text(_plain(picture.about, glyphs)),
        Text(""),
    ]
    for frame in picture.frames:
        parts += [*_frame(frame, glyphs, picture.language), Text("")]
    style = "green" if picture.agrees else "bold red"
    mark = glyphs.done if picture.agrees else glyphs.failed
    key = say(
        picture.language,
        "a piece shows the ranks that have it; 0+1: it is the sum of theirs",
        "每片上写着拥有它的 rank；0+1：它是两者之和",
    )
    parts += [_holdings(picture, glyphs), Text("")]
    parts += [Text(f"{mark} {_plain(picture.verdict, glyphs)}", style=style), Text(key, "dim")]
    return Group(*parts)


def _frame(frame: CubeFrame, glyphs: Glyphs, language: Language) -> Iterator[RenderableType]:
    yield Text(_plain(frame.title, glyphs), style="bold")
    drawn = [_sheet(sheet, glyphs) for sheet in frame.sheets]
    table = Table.grid(padding=(0, 1), pad_edge=False)
    for _ in range(5):
        table.add_column(vertical="middle", no_wrap=True)
    dot = "*" if glyphs is ASCII else "·"
    table.add_row(drawn[0], Text(f" {dot} "), drawn[1], Text(" = "), drawn[2])
    yield table
    sign = glyphs.arrow if frame.groups else glyphs.done
    style = "bold yellow" if frame.groups else "green"
    yield Text(f"{sign} {_plain(frame.moves, glyphs)}", style)
    yield Text(f"  {_plain(frame.why, glyphs)}{say(language, '.', '。')}")
    yield Text(f"  {_plain(frame.result, glyphs)}", style="dim")


def _sheet(sheet: TensorSheet, glyphs: Glyphs) -> Text:
    across, down, *corners = list(LINES[glyphs])
    names, columns = (_few(labels, "…") for labels in (sheet.rows, sheet.columns))
    tiles = [[listed(ranks, sheet.sign) for ranks in row] for row in sheet.tiles]
    texts = _few([[_plain(text, glyphs) for text in _few(row, "…")] for row in tiles],
                 [_plain("…", glyphs)] * len(columns))  # fmt: skip
    names, columns = ([_plain(name, glyphs) for name in labels] for labels in (names, columns))
    widths = [
        max(cell_len(name), *(cell_len(row[at]) for row in texts), 3) + 2
        for at, name in enumerate(columns)
    ]
    left = max(map(cell_len, names))
    margin = " " * (left + 1 if left else 0)
    drawn = Text(f"{margin}{sheet.name}\n", style="")
    if any(columns):
        heads = " ".join(f"{name:^{width}}" for name, width in zip(columns, widths, strict=True))
        drawn.append(f"{margin} {heads.rstrip()}\n", style="dim")

    def rule(first: str, between: str, last: str) -> str:
        return margin + first + between.join(across * width for width in widths) + last

    drawn.append(rule(*corners[:3]) + "\n", style="dim")
    for at, (name, row) in enumerate(zip(names, texts, strict=True)):
        drawn.append(f"{name:>{left}} " if left else "", style="dim")
        drawn.append(down, style="dim")
        for text, width in zip(row, widths, strict=True):
            drawn.append(f"{text:^{width}}", style="yellow" if sheet.summed else "")
            drawn.append(down, style="dim")
        last = at == len(texts) - 1
        drawn.append("\n" + rule(*(corners[6:] if last else corners[3:6])), style="dim")
        drawn.append("" if last else "\n")
    return drawn


def _few(pieces: Sequence[Any], between: Any) -> list[Any]:  # rows, or what stands in one
    """Return all pieces, or of many the first two, what stands for the others, and the last."""
    if len(pieces) <= MOST_PIECES:
        return list(pieces)
    return [*pieces[:2], between, pieces[-1]]


def _holdings(picture: CubePicture, glyphs: Glyphs) -> RenderableType:
    """Return a row for every rank: where it stands, and what it has of X, W and Y."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("rank", justify="right")
    cuts, language = picture.cube.cuts, picture.language
    for cut in cuts:
        table.add_column(say(language, cut.dim, DIM_NAMES.get(cut.dim, "")), justify="right")
    for tensor in ("X", "W", "Y"):
        table.add_column(f"{tensor}[{','.join(TENSORS[tensor])}]")
    table.add_column(say(language, "sends", "发送"))
    for rank, place in enumerate(picture.cube.places()):
        cells = [
            f"{shape_text(picture.run.shapes[rank][tensor])}, "
            f"{nbytes_text(picture.run.nbytes[rank][tensor])}"
            for tensor in ("X", "W", "Y")
        ]
        sent = sum(each.sent[rank] for each in picture.run.products.values())
        none = say(language, "nothing", "无")
        words = [str(rank), *map(str, place), *cells, nbytes_text(sent) if sent else none]
        table.add_row(*(_plain(word, glyphs) for word in words))
    return table


def _plain(text: str, glyphs: Glyphs) -> str:
    return text.translate(SPELLED) if glyphs is ASCII else text
