"""The view Tour: eight chapters in both languages, by keyboard, each with its picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from roundelay.view.languages import LANGUAGES, Language
from roundelay.web import Query
from roundelay.web.views.tour import tour

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHAPTERS = 8
LAST = {"en": "Why ZeRO-3 sends 50 % more", "zh": "为什么 ZeRO-3 要多发 50 %"}
MORE = {"en": "50 % more", "zh": "多 50 %"}
#: What each chapter shows.
PICTURES = (".stage", ".stage", ".stage", ".stage", "table.prices", ".drawing svg", ".zero-row",
            ".zero-row")  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3, 64, 1024])
def test_zero_holds_less_and_sends_half_as_much_again(ranks: int) -> None:
    rows = tour.answers["zero"](Query([("ranks", str(ranks))]))["rows"]
    totals = [row["total"] for row in rows]
    assert totals == sorted(totals, reverse=True)
    sent = {row["strategy"]: row["sent"] for row in rows}
    assert sent["ddp"] == sent["zero1"] == sent["zero2"]
    assert sent["zero3"] == 1.5 * sent["ddp"]
    assert [len(row["calls"]) for row in rows] == [2, 2, 2, 3]


def test_zero_has_the_table_of_the_paper() -> None:
    rows = tour.answers["zero"](Query([]))["rows"]
    assert [row["total_text"] for row in rows] == ["120 GB", "31.4 GB", "16.6 GB", "1.88 GB"]


@pytest.mark.browser
@pytest.mark.parametrize("language", LANGUAGES)
def test_all_chapters_are_walked_by_keyboard(
    language: Language, visit_web: Callable[..., Page]
) -> None:
    page = visit_web(f"/?lang={language}")
    titles = []
    for number in range(1, CHAPTERS + 1):
        page.locator(f'.chapters [aria-current="step"] >> text="{number}"').wait_for()
        page.locator(f".picture {PICTURES[number - 1]}").first.wait_for()
        titles.append(page.locator("h1").inner_text())
        assert page.locator(".end").is_visible() == (number == CHAPTERS)
        page.keyboard.press("n")
    assert len({*titles}) == CHAPTERS
    assert titles[-1] == LAST[language]
    assert MORE[language] in page.locator('[data-strategy="zero3"]').inner_text()
    assert "chapter=8" in page.evaluate("location.hash")
    page.keyboard.press("p")
    page.locator("h1", has_text=titles[-2]).wait_for()
    page.locator('[data-strategy="zero1"]', has_text="31.4 GB").wait_for()


@pytest.mark.browser
def test_a_picture_of_the_tour_steps_and_its_address_can_be_shared(
    visit_web: Callable[..., Page],
) -> None:
    page = visit_web("/tour?chapter=4&lang=en")
    page.locator("#status", has_text="Start").wait_for()
    page.keyboard.press("ArrowRight")
    page.locator("#status", has_text="Step 1 of 8").wait_for()
    shared = page.evaluate("location.hash").removeprefix("#")
    other = visit_web(shared)
    other.locator("#status", has_text="Step 1 of 8").wait_for()
    other.locator('td[data-cell="1-0"]', has_text="a0+a1").wait_for()
    page = visit_web("/tour?chapter=2&collective=reduce_scatter&step=1&lang=en")
    page.locator("td.done", has_text="10").first.wait_for()
