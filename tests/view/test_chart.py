"""Charts and timelines: well-formed, every point where it belongs, every name escaped."""

from __future__ import annotations

import itertools
import math
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.view.chart import BOTTOM, LEFT, RIGHT, TOP, Axis, chart
from roundelay.view.timeline import SEEN, TRAVEL, Lane, timeline

SVG = "{http://www.w3.org/2000/svg}"
numbers = st.floats(1e-6, 1e6)


@given(st.dictionaries(st.text(max_size=9), st.lists(st.tuples(numbers, numbers), max_size=9),
                       max_size=8), st.sampled_from([0, 2, 10]))  # fmt: skip
def test_every_point_lies_in_the_frame_and_in_order(
    curves: dict[str, list[tuple[float, float]]], base: int
) -> None:
    drawn = chart(curves, title="<&>", across=Axis("x", base=base), up=Axis("y", base=base))
    root = ET.fromstring("".join(c for c in drawn if c.isprintable() or c == "\n"))
    circles = [
        (float(one.get("cx", 0)), float(one.get("cy", 0))) for one in root.iter(f"{SVG}circle")
    ]
    assert len(circles) == sum(map(len, curves.values()))
    assert all(
        LEFT - 0.1 <= x <= RIGHT + 0.1 and TOP - 0.1 <= y <= BOTTOM + 0.1 for x, y in circles
    )
    points = [point for line in curves.values() for point in line]
    by_x = sorted(zip(points, circles, strict=True), key=lambda both: both[0][0])
    places = [circle[0] for _, circle in by_x]
    assert places == sorted(places)


@pytest.mark.parametrize("most", [0.5, 3.0, 70.0, 12345.0])
def test_marks_are_round_and_few(most: float) -> None:
    drawn = chart({"a": [(0, 0), (most, most)]}, title="", across=Axis("x"), up=Axis("y"))
    marks = [float(one.text or "") for one in ET.fromstring(drawn).iter(f"{SVG}text")
             if one.text and one.text.replace(".", "").replace("e+", "").isdigit()]  # fmt: skip
    steps = {round(b - a, 9) for a, b in itertools.pairwise(marks) if b > a}
    assert all(f"{step:e}"[0] in "125" for step in steps), steps
    assert 4 <= len(marks) <= 20
    assert max(marks) >= most or math.isclose(max(marks), most)


def test_what_backward_hid_is_blue_and_what_it_did_not_is_orange() -> None:
    lanes = [Lane(1024, 1.0, 1.0, 2.0), Lane(2048, 2.5, 2.5, 4.0), Lane(4096, 3.0, 4.0, 5.0)]
    root = ET.fromstring(timeline(lanes, began=0.0, ended=3.0, title="a < b"))
    bars = [(one.get("fill"), float(one.get("width", 0))) for one in root.iter(f"{SVG}rect")
            if one.get("rx")]  # fmt: skip
    scale = bars[0][1] / 3.0  # backward took 3 seconds
    blue = sum(width for fill, width in bars if fill == TRAVEL) / scale
    orange = sum(width for fill, width in bars if fill == SEEN) / scale
    assert blue == pytest.approx(1.0 + 0.5, abs=0.05)
    assert orange == pytest.approx(1.0 + 1.0, abs=0.05)
    assert len(list(root.iter(f"{SVG}circle"))) == len(lanes)
