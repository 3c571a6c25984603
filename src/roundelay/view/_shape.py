"""What the page and the SVG draw alike: messages, the slots of each rank, a hue for each chunk."""

from __future__ import annotations

import math
from collections.abc import Iterable

from roundelay.schedule import Cell, Transfer
from roundelay.view.picture import Picture

#: Up to here every rank shows a slot for every chunk, held or not, so that columns line up.
ALWAYS_ALIGNED = 16

Message = tuple[int, int, list[Transfer]]


def messages(transfers: Iterable[Transfer]) -> list[Message]:
    """Join the transfers of a step that go from one rank to one other: they travel together.

    >>> [(src, dst, len(joined)) for src, dst, joined in messages(
    ...     [Transfer(0, 0, 1, 0), Transfer(0, 1, 0, 0), Transfer(0, 0, 1, 1)])]
    [(0, 1, 2), (1, 0, 1)]
    """
    pairs: dict[tuple[int, int], list[Transfer]] = {}
    for transfer in transfers:
        pairs.setdefault((transfer.src, transfer.dst), []).append(transfer)
    return [(src, dst, joined) for (src, dst), joined in pairs.items()]


def op_of(transfers: Iterable[Transfer]) -> str:
    """Return the op that all transfers of a message share, or `mixed`."""
    ops = {transfer.op for transfer in transfers}
    return ops.pop() if len(ops) == 1 else "mixed"


def slots(picture: Picture) -> list[list[int]]:
    """List for each rank the chunks it has a place for: all, or those it ever holds if few are."""
    size, chunks = len(picture.ranks), len(picture.chunks)
    held: list[set[int]] = [set() for _ in range(size)]
    # Cells are never emptied, so the last frame has every cell that ever held something.
    for rank, chunk in picture.frames[-1].cells:
        held[rank].add(chunk)
    few = chunks <= ALWAYS_ALIGNED and picture.schedule.collective.named is None
    if few or 2 * sum(map(len, held)) >= size * chunks:
        return [list(range(chunks)) for _ in range(size)]
    start = picture.frames[0].cells
    # What a rank has had from the start comes first, what it is sent after that.
    return [
        sorted(mine & own) + sorted(mine - own)
        for rank, mine in enumerate(held)
        for own in ({chunk for chunk in mine if Cell(rank, chunk) in start},)
    ]


def chunk_hues(picture: Picture) -> list[int]:
    """Return a hue for each chunk; where each has one destination, a hue for each of those."""
    schedule = picture.schedule
    if schedule.collective.named is None:
        return hues(schedule.chunks)
    end = {cell.chunk: cell.rank for cell, _ in schedule.due_after()}
    return [hues(schedule.size)[end.get(chunk, 0)] for chunk in range(schedule.chunks)]


def hues(count: int) -> list[int]:
    """Return `count` hues in degrees, as far apart as they can be, from blue on.

    >>> hues(4)
    [250, 340, 70, 160]
    """
    return [(250 + index * 360 // count) % 360 for index in range(count)]


def colour(lightness: float, chroma: float, hue: float) -> str:
    """Return an Oklch colour as sRGB hex, for renderers that know no other.

    >>> colour(1.0, 0.0, 0.0), colour(0.0, 0.0, 0.0), colour(0.628, 0.2577, 29.23)
    ('#ffffff', '#000000', '#ff0000')
    """
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    # Björn Ottosson's Oklab: back to cone responses, then to linear sRGB.
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(value)):02x}" for value in linear)


def _gamma(linear: float) -> float:
    value = min(max(linear, 0.0), 1.0)
    straight = 12.92 * value  # sRGB is a line near black, then a power
    return straight if value <= 0.04045 / 12.92 else 1.055 * value ** (1 / 2.4) - 0.055
