"""The view Planner: what it shows is what `roundelay plan` prints, before and after a slider."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from roundelay.cli._group import roundelay
from roundelay.errors import InvalidArgumentError
from roundelay.networks import cluster_names
from roundelay.planning import gigabytes
from roundelay.view.languages import LANGUAGES, Language
from roundelay.web import Query
from roundelay.web.views.planner import planner

if TYPE_CHECKING:
    from playwright.sync_api import Page

COLUMNS = ("parameters", "gradients", "optimizer", "activations", "transient", "total")
STATES: list[dict[str, str]] = [
    {},
    {"gpus": "8"},
    {"params": "7e10", "gpus": "8", "lang": "zh"},
    {"params": "1.3e9", "gpus": "1", "memory": "24"},
    {"params": "7e10", "layers": "80", "hidden": "8192", "gpus": "512", "sequence": "8192"},
    {"gpus": "96", "batch": "960"},
    {"memory": "79.123456789"},
    *({"network": name, "precision": "all"} for name in cluster_names()),
]


def asked(state: dict[str, str]) -> dict[str, Any]:
    query = Query(state.items())
    found = planner.answers["plan"](query)
    query.finish()
    return found


@pytest.mark.parametrize("state", STATES, ids=str)
def test_the_command_that_is_shown_gives_the_same_table(state: dict[str, str]) -> None:
    found = asked(state)
    words = found["command"].split()
    assert words.pop(0) == "roundelay"
    printed = CliRunner().invoke(roundelay, [*words, "--json"])
    table = json.loads(printed.stdout)
    for name in ("model", "gpus", "memory", "batch", "sequence", "looked_at", "fitting", "best"):
        assert found[name] == table[name]
    for shown, one in zip(found["options"], table["options"], strict=True):
        assert {name: shown[name] for name in one} == one
        assert [shown["texts"][name] for name in COLUMNS] == [
            gigabytes(one["bytes"][name]) for name in COLUMNS
        ]
    assert sum(one["best"] for one in found["options"]) == (table["best"] is not None)
    assert found["reason"]


@pytest.mark.parametrize(
    "state",
    [{"gpus": "0"}, {"gpus": "x"}, {"params": "1"}, {"network": "../../etc"}, {"layers": "-1"},
     {"params": "7e9", "layers": "2", "hidden": "64"}, {"gpus": "7", "batch": "5"}],
)  # fmt: skip
def test_what_can_not_be_planned_is_refused_with_a_sentence(state: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"\w+ .*\."):
        asked(state)


def shown(page: Page) -> list[list[str]]:
    rows: list[list[str]] = page.evaluate(
        """() => [...document.querySelectorAll("table.plan tbody tr")].map((row) =>
          [...row.querySelectorAll("th, td:not(.bars)")].map((cell) =>
            cell.textContent.replace("▸ ", "")))"""
    )
    return rows


def expected(found: dict[str, Any]) -> list[list[str]]:
    names = ("mesh", "rows", *COLUMNS, "spare", "step", "waits")
    return [[one["strategy"], *(one["texts"][name] for name in names)] for one in found["options"]]


def wait_for_gpus(page: Page, gpus: int) -> None:
    page.locator(".command", has_text=f"--gpus {gpus} ").wait_for()


@pytest.mark.browser
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_slider_moves_and_the_numbers_are_right(
    language: Language, visit_web: Callable[..., Page]
) -> None:
    page = visit_web(f"/planner?lang={language}")
    wait_for_gpus(page, 64)
    assert shown(page) == expected(asked({"lang": language}))
    slider = page.locator("#knob-gpus").locator("xpath=ancestor::div[1]").locator("input.range")
    slider.focus()
    for power in (5, 4, 3):
        page.keyboard.press("ArrowLeft")
        wait_for_gpus(page, 2**power)
    found = asked({"gpus": "8", "lang": language})
    assert shown(page) == expected(found)
    assert found["reason"] in page.locator(".best").inner_text()
    assert "gpus=8" in page.evaluate("location.hash")
    assert page.locator("tr.chosen th").inner_text().endswith(found["best"]["strategy"])
    widths = page.evaluate(
        """() => [...document.querySelectorAll("tr.chosen .bar .part")].map((each) =>
          [each.className.split(" ")[1], each.getBoundingClientRect().width])"""
    )
    held = found["best"]["bytes"]
    whole = sum(width for _, width in widths)
    for name, width in widths:
        assert width / whole == pytest.approx(held[name] / held["total"], abs=0.02)


@pytest.mark.browser
def test_a_field_takes_any_number_and_the_formulas_and_the_curve_are_there(
    visit_web: Callable[..., Page],
) -> None:
    page = visit_web("/planner?why=1&lang=en")
    wait_for_gpus(page, 64)
    page.locator("#knob-params").fill("13B")
    page.keyboard.press("Enter")
    page.locator(".command", has_text="--params 1.3e10 ").wait_for()
    found = asked({"params": "13000000000"})
    terms = page.locator(".why .numbers").all_inner_texts()
    assert terms == [f"= {term['numbers']}" for term in found["why"]]
    page.locator(".curve svg title", has_text="1.3e10 parameters").wait_for(state="attached")
    page.locator("#knob-params").fill("")
    page.keyboard.press("Enter")
    page.locator(".command", has_text="--params 7.5e9 ").wait_for()
