"""A pipeline's timeline in a terminal: a line per rank, as many columns as there is time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from rich.cells import cell_len
from rich.text import Text

from roundelay.language import say
from roundelay.view.pipeline_picture import PipelineBox, PipelinePicture
from roundelay.view.terminal_text import Glyphs, safe

__all__ = ["pipeline_lines"]

STYLES = {"F": "black on bright_blue", "B": "black on bright_green", "W": "black on bright_yellow"}
#: Other stages of the same rank.
OTHERS = {"F": "white on blue", "B": "white on green", "W": "white on yellow"}
MOST_UNITS = 20_000
FINEST = 64  # parts of a unit of time that are told apart


def pipeline_lines(picture: PipelinePicture, *, width: int, glyphs: Glyphs) -> Iterator[Text]:
    """Yield the lines; a timeline that is too wide goes on below, from where it was left."""
    yield Text(safe(picture.title, glyphs), style="bold")
    unit = _unit(picture)
    across = len(str(picture.schedule.micro_batches - 1)) + 1  # columns of a unit of time
    left = max(map(len, picture.names)) + 2
    language = picture.language
    ends = [f"  {say(language, 'keeps', '保留')} {peak}" for peak in picture.peaks]
    room = max(1, (width - left - max(map(cell_len, ends))) // across)
    units = round(picture.price.makespan / unit)
    rows = [_row(boxes, unit, across, units, glyphs) for boxes in picture.rows]
    for start in range(0, units, room):
        stop = min(start + room, units)
        yield Text("")
        for name, row, end in zip(picture.names, rows, ends, strict=True):
            line = Text(safe(name, glyphs).ljust(left))
            line.append_text(row[start * across : stop * across])
            yield line + (end if stop == units else "")
    yield Text("")
    idle = glyphs.levels[0]
    told = [f"{letter} {meaning}" for letter, meaning in picture.meanings().items()]
    told.append(f"{idle} {say(language, 'waits', '等待')}")
    if picture.schedule.stages > picture.schedule.size:
        told.append(
            say(language, "small letters: every other stage of a rank",
                "小写字母：一个 rank 上隔一个的阶段")
        )  # fmt: skip
    told.append(say(language, "the number is the micro-batch's", "数字是微批编号"))
    yield Text(safe(say(language, "; ", "；").join(told), glyphs))
    for note in picture.notes:
        yield Text(safe(note, glyphs))


def _unit(picture: PipelinePicture) -> float:
    """Return the longest time of which all times are multiples, if that is not too short."""
    times = {box.start for row in picture.rows for box in row}
    times |= {box.end for row in picture.rows for box in row}
    unit = Fraction(0)
    for each in times:
        step = Fraction(each).limit_denominator(FINEST)
        unit = Fraction(math.gcd(unit.numerator * step.denominator,
                                 step.numerator * unit.denominator),
                        unit.denominator * step.denominator)  # fmt: skip
    least = picture.price.makespan / MOST_UNITS
    return max(float(unit), least) or 1.0


def _row(
    boxes: tuple[PipelineBox, ...], unit: float, across: int, units: int, glyphs: Glyphs
) -> Text:
    row, at = Text(), 0
    for box in boxes:
        first, last = round(box.start / unit), round(box.end / unit)
        row.append(glyphs.levels[0] * across * max(0, first - at), style="dim")
        letter = box.letter.lower() if box.local % 2 else box.letter
        words = f"{letter}{box.micro_batch}".ljust(across * (last - first), glyphs.empty)
        row.append(words[: across * (last - first)],
                   style=(OTHERS if box.local % 2 else STYLES)[box.letter])  # fmt: skip
        at = last
    row.append(glyphs.levels[0] * across * max(0, units - at), style="dim")
    return row
