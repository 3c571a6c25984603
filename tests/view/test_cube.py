"""The cube as SVG and page: a box for each rank's part, one frame per product, in a browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from roundelay.contraction import PRODUCTS, cut_along
from roundelay.view.cube import CubePicture, CubeRun, ProductRun, cube_picture
from roundelay.view.cube_page import cube_page
from roundelay.view.cube_svg import cube_svg

if TYPE_CHECKING:
    from playwright.sync_api import Page

LENGTHS = {"b": 2, "s": 4, "h": 4, "o": 6}
CUTS = [
    (["batch"], [2]), (["sequence"], [4]), (["rows"], [3]), (["columns"], [2]), (["none"], [3]),
    (["batch", "columns"], [2, 3]), (["rows", "sequence"], [2, 2]), (["rows", "columns"], [4, 4]),
]  # fmt: skip


def drawn(dims: list[str], ranks: list[int]) -> CubePicture:
    """Draw a cube as if it had run: the view runs nothing itself."""
    cube = cut_along(dims, ranks, LENGTHS)
    tensors = ("X", "W", "Y")
    run = CubeRun(
        shapes=[{name: cube.shape(rank, name) for name in (*tensors, "dX", "dW")}
                for rank in range(cube.size)],
        nbytes=[dict.fromkeys((*tensors, "dX", "dW"), 8) for _ in range(cube.size)],
        products={each.result: ProductRun([0] * cube.size, 0.0, ["1", "2"]) for each in PRODUCTS},
    )  # fmt: skip
    return cube_picture(cube, run)


@pytest.mark.parametrize(("dims", "ranks"), CUTS, ids=str)
def test_every_rank_is_drawn_within_the_paper(dims: list[str], ranks: list[int]) -> None:
    picture = drawn(dims, ranks)
    root = ET.fromstring(cube_svg(picture))
    kinds = [element.get("class", "").split() for element in root.iter()]
    for rank in range(picture.cube.size):
        faces = {kind[1] for kind in kinds if kind[:1] == ["cell"] and kind[-1] == f"r{rank}"}
        assert {"top", "side", "front"} <= faces
    assert sum(kind == ["frame"] for kind in kinds) == 3
    moving = sum(kind == ["moving"] for kind in kinds)
    assert moving == sum(bool(picture.cube.groups(each)) for each in PRODUCTS)
    wide, high = float(root.get("width", 0)), float(root.get("height", 0))
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        if text.get("x"):
            assert -1 <= float(text.get("x", 0)) <= wide
            assert float(text.get("y", 0)) <= high


def test_the_page_steps_from_product_to_product(visit: Callable[..., Page]) -> None:
    page = visit(cube_page(drawn(["batch", "columns"], [2, 3])))
    away = "document.querySelectorAll('.frame.away').length"
    assert page.inner_text("#status") == "The cut"
    assert page.evaluate(away) == 0
    for title in ("Forward: Y = X·W", "Backward: dX = dY·Wᵀ", "Backward: dW = Xᵀ·dY"):
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#status") == title
        assert page.evaluate(away) == 2
    assert "All-reduce of dW over ranks 0 3 | 1 4 | 2 5" in page.inner_text("#words")
    page.keyboard.press("Home")
    assert page.inner_text("#status") == "The cut"
    page.click("#play")
    assert page.get_attribute("#play", "aria-label") == "Pause"
    page.click("#play")
    assert page.get_attribute("#play", "aria-label") == "Play"


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_its_window(visit: Callable[..., Page], width: int) -> None:
    page = visit(cube_page(drawn(["rows"], [3])), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    ("dims", "ranks"),
    [*CUTS, (["batch", "sequence", "columns"], [2, 2, 2]), (["batch", "rows"], [2, 2]),
     (["batch", "sequence", "rows", "columns"], [2, 2, 2, 2])],
    ids=str,
)  # fmt: skip
def test_words_stay_inside_of_their_panel(dims: list[str], ranks: list[int]) -> None:
    root = ET.fromstring(cube_svg(drawn(dims, ranks)))
    panels = [one for one in root.iter() if one.get("class") in ("moving", "band")]
    assert len(panels) == 3
    inside = 0
    for panel in panels:
        left, top, high = (float(panel.get(key, 0)) for key in ("x", "y", "height"))
        for text in (one for one in root.iter() if one.tag.endswith("text")):
            x, y = float(text.get("x", 0)), float(text.get("y", 0))
            if x > left and top < y <= top + high + 12:
                inside += 1
                assert y <= top + high - 8, "".join(text.itertext())
    assert inside
