"""The view Training in a real browser: what it shows is what Python says, in both languages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from roundelay.view.languages import LANGUAGES, Language
from roundelay.view.training_step import STRATEGY_NAMES, StepChoices, step_document

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


def frames(document: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document["frames"]
    return found


def at(page: Page, panel: int, frame: dict[str, Any]) -> None:
    """Wait until a panel shows a moment."""
    section = page.locator(".strategy").nth(panel)
    section.locator(".words", has_text=frame["words"]).wait_for()
    section.locator(".moment", has_text=frame["title"]).wait_for()


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_every_strategy_is_walked(
    strategy: str, language: Language, visit_web: Callable[..., Page]
) -> None:
    document = step_document(StepChoices(strategy, ranks=3, layers=3, straggler=1), language)
    page = visit_web(f"/training?strategy={strategy}&ranks=3&layers=3&straggler=1&lang={language}")
    told = frames(document)
    at(page, 0, told[0])
    for frame in told[1:6]:
        page.keyboard.press("ArrowRight")
        at(page, 0, frame)
    page.keyboard.press("End")
    last = told[-1]
    at(page, 0, last)
    assert page.locator(".strategy h2").inner_text().startswith(str(document["name"]))
    assert page.locator("svg.ranks .total").all_text_contents() == last["total"]
    sent = page.locator("svg.ranks .sent").all_text_contents()
    assert all(text in said for text, said in zip(last["sent_text"], sent, strict=True))
    assert f"step={len(told) - 1}" in page.evaluate("location.hash")
    assert page.locator("dl.costs dd").first.inner_text() == document["seconds"]


@pytest.mark.parametrize("width", [1400, 400])
def test_two_strategies_on_one_clock(width: int, visit_web: Callable[..., Page]) -> None:
    documents = [step_document(StepChoices(name)) for name in ("ddp", "zero3")]
    page = visit_web("/training?strategy=ddp&compare=zero3", width=width)
    at(page, 1, frames(documents[1])[0])
    assert page.locator(".strategy").count() == 2
    page.keyboard.press("End")
    for panel, document in enumerate(documents):
        at(page, panel, frames(document)[-1])
    sent = [page.locator(".strategy").nth(panel).locator(".sent").first.text_content()
            for panel in (0, 1)]  # fmt: skip
    assert sent == ["sent 2.42 GB", "sent 3.62 GB"]  # half as much again
    # By the time that ZeRO-3 is over, DDP still steps.
    times = sorted({frame["at"] for one in documents for frame in frames(one)[1:]})
    over = times.index(documents[1]["milliseconds"]) + 1
    page.locator("#slider").fill(str(over))
    at(page, 1, frames(documents[1])[-1])
    assert page.locator(".strategy").first.locator(".moment").inner_text() == "Optimizer step"
    clocks = {page.locator(".cursor").nth(panel).get_attribute("d") for panel in (0, 1)}
    assert len(clocks) == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_controls_change_the_address_and_the_picture(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/training")
    page.get_by_label("Strategy").select_option("zero2")
    page.locator(".strategy h2", has_text="ZeRO-2").wait_for()
    page.get_by_label("Precision", exact=True).select_option("fp32")
    page.locator(".precision", has_text="fp32").wait_for()
    page.get_by_label("Ranks").fill("2")
    page.locator(".words", has_text="each rank keeps 1/2 of them").wait_for()
    assert page.locator("svg.ranks .total").count() == 2
    page.get_by_label("Straggler").select_option("1")
    page.locator(".words", has_text="Rank 1 computes 3 times as slowly").wait_for()
    address = page.evaluate("location.hash")
    for part in ("strategy=zero2", "precision=fp32", "ranks=2", "straggler=1"):
        assert part in address
    document = step_document(StepChoices("zero2", ranks=2, precision="fp32", straggler=1))
    page.keyboard.press("Escape")
    page.locator("#last").click()
    at(page, 0, frames(document)[-1])


def test_what_moves_is_marked(visit_web: Callable[..., Page]) -> None:
    document = step_document(StepChoices("ddp"))
    number = next(at for at, frame in enumerate(frames(document)) if frame["moves"])
    page = visit_web(f"/training?strategy=ddp&step={number}")
    at(page, 0, frames(document)[number])
    bucket = frames(document)[number]["moves"][0]
    assert page.locator(".cell.moving").count() == 4 * len(bucket["units"])
    assert page.locator(".port").count() == 2 * 4  # each rank sends and receives
    assert page.locator(".travels").text_content() == f"all-reduce · {bucket['text']}"
    assert page.locator("svg.lanes .span.network.on").count() == 4


def test_words_are_there_in_both_languages(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/training")
    both: dict[str, dict[str, dict[str, str]]] = page.evaluate(
        "Promise.all(['training', 'timelines'].map((name) => import(`./${name}.js`)))"
        ".then((all) => Object.assign({}, ...all.map(({ view }) => ({ [view.name]: view.words }))))"
    )
    for words in both.values():
        english, chinese = words["en"], words["zh"]
        assert set(english) == set(chinese)
        for key, said in english.items():
            assert holes(said) == holes(chinese[key]), key


def holes(text: str) -> list[str]:
    """Return the names of what a text leaves open."""
    return sorted(part.partition("}")[0] for part in text.split("{")[1:])
