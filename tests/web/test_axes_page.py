"""The view Axes: drawings are those of `explain`, and every state is in the address."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from roundelay.cli._group import roundelay
from roundelay.errors import InvalidArgumentError
from roundelay.parallel.mesh import Mesh
from roundelay.pipelines import pipelines
from roundelay.view.languages import LANGUAGES, Language
from roundelay.view.mesh_svg import AXIS_ORDER, mesh_groups
from roundelay.web import Query
from roundelay.web.views.axes import axes

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

    from roundelay.communicator import Communicator

DRAWN = [
    ("cube", {"split": "rows", "ranks": "3"}),
    ("cube", {"split": "batch", "ranks": "2", "second": "columns", "ranks2": "3"}),
    ("cube", {"split": "none", "ranks": "2"}),
    *(("pipeline", {"schedule": maker.word, "ranks": "4"}) for maker in pipelines),
    ("pipeline", {"schedule": "gpipe", "ranks": "1", "micro_batches": "3"}),
]
#: What asks for a style in markup, or runs a script: the page's policy forbids both.
FORBIDDEN = re.compile(r"<style|\sstyle=|<script|\son\w+=|javascript:")


def asked(question: str, state: dict[str, str]) -> dict[str, Any]:
    query = Query(state.items())
    found = axes.answers[question](query)
    query.finish()
    return found


def shapes(svg: str) -> list[tuple[str, str | None, str | None]]:
    return [(each.tag, each.get("class"), each.get("d")) for each in ET.fromstring(svg).iter()
            if not each.tag.endswith("style")]  # fmt: skip


@pytest.mark.parametrize(("question", "state"), DRAWN, ids=str)
def test_a_drawing_is_that_of_explain(question: str, state: dict[str, str], tmp_path: Path) -> None:
    found = asked(question, state)
    words = found["command"].split()[1:]
    file = tmp_path / "drawn.svg"
    result = CliRunner().invoke(roundelay, [*words, "--out", str(file)])
    assert result.exit_code == 0, result.output
    assert shapes(found["svg"]) == shapes(file.read_text(encoding="utf-8"))
    assert not FORBIDDEN.search(found["svg"])
    assert found["style"] in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_attention_has_a_drawing_for_each_step(method: str, language: Language) -> None:
    for layout, mask, ranks in product(("contiguous", "zigzag"), ("causal", "full"), (1, 3, 8)):
        state = {"method": method, "layout": layout, "mask": mask, "ranks": str(ranks)}
        found = asked("attention", {**state, "lang": language})
        assert len(found["frames"]) == (ranks if method == "ring" else 3)
        assert not any(FORBIDDEN.search(frame["svg"]) for frame in found["frames"])


@pytest.mark.parametrize(
    ("question", "state"),
    [("cube", {"split": "depth"}), ("cube", {"second": "batch"}), ("pipeline", {"ranks": "99"}),
     ("mesh", {"dp": "8", "tp": "8", "pp": "2"}), ("mesh", {"along": "ep"})],
)  # fmt: skip
def test_what_can_not_be_drawn_is_refused(question: str, state: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError):
        asked(question, state)


def test_groups_of_a_mesh_are_those_of_real_ranks() -> None:
    lengths = {"pp": 2, "dp": 2, "cp": 1, "tp": 2}

    def work(comm: Communicator) -> dict[str, list[int]]:
        mesh = Mesh(comm=comm, **lengths)
        return {name: mesh.ranks(name) for name in AXIS_ORDER}

    from roundelay.launch import run  # noqa: PLC0415 - ranks, for this test alone

    for rank, found in enumerate(run(work, 8, "threads")):
        for name, group in found.items():
            assert group in mesh_groups(lengths, name)
            assert rank in group


@pytest.mark.browser
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_picture_is_shown(language: Language, visit_web: Callable[..., Page]) -> None:
    page = visit_web(f"/axes?lang={language}")
    seen = page.locator(".drawing svg")
    for show in ("cube", "pipeline", "attention", "mesh"):
        page.locator(f'.tabs input[value="{show}"]').check(force=True)
        page.locator(f".axes-{show} .drawing svg").wait_for()
        found = asked(show, {"lang": language})
        svg = found["frames"][0]["svg"] if show == "attention" else found["svg"]
        assert seen.locator("rect").count() == svg.count("<rect")
        assert found["command"] in page.locator(".shell").inner_text()
        if show != "mesh":
            assert page.locator("h2").first.inner_text() == found["title"]


@pytest.mark.browser
def test_a_drawing_follows_the_theme(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/axes?show=mesh&lang=en", color_scheme="light")
    number = page.locator(".drawing .number").first
    number.wait_for()
    fill = "each => getComputedStyle(each).fill"
    light = number.evaluate(fill)
    page.locator("button.theme").click()
    assert number.evaluate(fill) == light
    page.locator("button.theme").click()
    assert number.evaluate(fill) != light
    page.emulate_media(color_scheme="dark")
    page.locator("button.theme").click()  # as the system, again
    assert number.evaluate(fill) != light


@pytest.mark.browser
def test_frames_and_controls_are_in_the_address(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/axes?split=rows&ranks=3&step=1&lang=en")
    page.locator("#status", has_text="Forward: Y = X·W").wait_for()
    page.keyboard.press("ArrowRight")
    page.locator("#status", has_text="Backward: dX").wait_for()
    assert page.locator(".drawing .frame.away").count() == 2
    assert "step=2" in page.evaluate("location.hash")
    page = visit_web("/axes?show=mesh&along=dp&tp=1&lang=en")
    page.locator(".words", has_text="Along dp, data parallel: 2 groups of 2 ranks").wait_for()
    page.locator(".axes-mesh select").select_option("pp")
    page.locator(".words", has_text="Along pp").wait_for()
    assert "along=pp" in page.evaluate("location.hash")
