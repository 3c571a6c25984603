from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from xml.etree import ElementTree as ET

import pytest

from roundelay.algorithms import algorithms
from roundelay.errors import InvalidArgumentError
from roundelay.view import Picture
from roundelay.view._shape import messages, op_of
from roundelay.view.captions import printable
from roundelay.view.svg import svg

SIZES = (1, 2, 3, 5, 8)
NAMESPACE = "{http://www.w3.org/2000/svg}"


def parse(text: str) -> ET.Element:
    return ET.fromstring(text)


def having(root: ET.Element, kind: str) -> list[ET.Element]:
    return [element for element in root.iter() if kind in element.get("class", "").split()]


def placed(element: ET.Element, x: float = 0, y: float = 0) -> Iterator[tuple[float, float]]:
    """Yield where the right bottom corners of all rectangles lie."""
    move = re.fullmatch(r"translate\(([\d.]+) ([\d.]+)\)", element.get("transform", ""))
    if move:
        x, y = x + float(move[1]), y + float(move[2])
    if element.tag == f"{NAMESPACE}rect":
        left, top, width, height = (
            float(element.get(name, "0")) for name in ("x", "y", "width", "height")
        )
        yield x + left + width, y + top + height
    for child in element:
        yield from placed(child, x, y)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", algorithms.names())
def test_draws_every_message_and_every_cell(
    name: str, size: int, drawn: Callable[..., Picture]
) -> None:
    picture = drawn(name, size)
    text = svg([picture])
    root = parse(text)

    assert text == svg([drawn(name, size)])
    sent = [message for frame in picture.frames for message in messages(frame.transfers)]
    assert len(having(root, "arrow")) == len(sent)
    for op in ("copy", "reduce"):
        arrows = [arrow for arrow in having(root, op) if "arrow" in arrow.get("class", "")]
        assert len(arrows) == sum(op_of(joined) == op for _, _, joined in sent)
    views = [view for frame in picture.frames for view in frame.cells.values()]
    cells = having(root, "cell")
    assert len(cells) == len(views)
    assert sum("done" in cell.get("class", "") for cell in cells) == sum(v.done for v in views)
    assert len(having(root, "changed")) == sum(len(frame.changed) for frame in picture.frames)
    assert len(having(root, "step")) == len(picture.frames)
    assert not having(root, "failed")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", algorithms.names())
def test_nothing_lies_outside(name: str, size: int, drawn: Callable[..., Picture]) -> None:
    root = parse(svg([drawn(name, size), drawn("broadcast_chain", 4)]))
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    corners = list(placed(root))
    assert max(x for x, _ in corners) <= width
    assert max(y for _, y in corners) <= height


def test_arrows_run_from_source_to_target(drawn: Callable[..., Picture]) -> None:
    """In the broadcast of one chunk, an arrow starts and ends at the middles of two lanes."""
    picture = drawn("broadcast_direct", 3)
    root = parse(svg([picture]))
    lanes = [float(name.get("x", "")) for name in having(root, "name")]
    found = []
    for arrow in having(root, "arrow"):
        line = having(arrow, "line")[0].get("d", "")
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", line)]
        found.append((lanes.index(numbers[0]), lanes.index(numbers[-2])))
    assert sorted(found) == [(0, 1), (0, 2)]


def test_texts_are_shown_where_they_fit(drawn: Callable[..., Picture]) -> None:
    picture = drawn("all_reduce_tree", 4)
    shown = [element.text for element in having(parse(svg([picture])), "in")]
    assert sorted(map(str, shown)) == sorted(
        view.text for frame in picture.frames for view in frame.cells.values()
    )


def test_marks_failing_steps(broken: Picture) -> None:
    root = parse(svg([broken]))
    last = len(broken.frames) - 1
    failing = {last if f.step is None else f.step + 1 for f in broken.failures}
    marked = {
        index
        for index, step in enumerate(having(root, "step"))
        if "failed" in step.get("class", "").split()
    }
    assert failing
    assert marked == failing
    told = [each for each in having(root, "which") if "bad" in each.get("class", "").split()]
    assert len(having(root, "failed")) == len(told) == len(failing)
    assert len(having(root, "wrong")) > 0


def test_hostile_titles_stay_text(hostile: str, drawn: Callable[..., Picture]) -> None:
    tame = parse(svg([drawn("broadcast_direct", 2)]))
    text = svg([drawn("broadcast_direct", 2, title=hostile, rank_name=hostile[:20])])
    root = parse(text)
    text.encode("utf-8")
    assert {element.tag for element in root.iter()} == {element.tag for element in tame.iter()}
    assert root.findtext(f"{NAMESPACE}title") == printable(hostile)


def test_two_pictures_stand_side_by_side(drawn: Callable[..., Picture]) -> None:
    pair = [drawn("all_reduce_ring", 5), drawn("all_reduce_tree", 5)]
    both, ring, tree = (parse(svg(pictures)) for pictures in (pair, pair[:1], pair[1:]))
    for kind in ("arrow", "cell", "step"):
        assert len(having(both, kind)) == len(having(ring, kind)) + len(having(tree, kind))
    assert float(both.get("height", "")) <= float(ring.get("height", "")) + 40


def test_very_large_schedules_draw_what_each_step_writes(drawn: Callable[..., Picture]) -> None:
    picture = drawn("all_reduce_ring", 40)
    text = svg([picture])
    root = parse(text)
    first = len(picture.frames[0].cells)
    assert len(having(root, "cell")) == first + sum(len(f.changed) for f in picture.frames)
    assert not having(root, "letter")
    assert len(text) < 3_000_000


def test_letters_are_readable_on_every_colour(drawn: Callable[..., Picture]) -> None:
    style = parse(svg([drawn("all_reduce_ring", 16)])).findtext(f"{NAMESPACE}style") or ""
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    for theme in (light, dark):
        ink = re.search(r"\.ink\{fill:(#\w+)\}", theme)
        fills = re.findall(r"\.h\d+\{fill:(#\w+);", theme)
        assert ink is not None
        assert len(fills) == 16
        assert min(contrast(ink[1], fill) for fill in fills) >= 4.5


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as the accessibility guidelines count it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("count", [0, 3])
def test_draws_one_or_two(count: int, drawn: Callable[..., Picture]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"not {count}"):
        svg([drawn("broadcast_direct", 2)] * count)
