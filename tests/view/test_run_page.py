"""The timeline of a recorded run: what it says, and that strangers' names are text only."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from roundelay.records import RankRecord, RunRecord
from roundelay.records.events import KINDS
from roundelay.view.languages import LANGUAGES, Language
from roundelay.view.run_lanes import windows
from roundelay.view.run_page import run_page
from roundelay.view.run_summary import summary
from roundelay.view.run_svg import run_style, run_svg

if TYPE_CHECKING:
    from playwright.sync_api import Page

MS = 1_000_000  # nanoseconds
NS = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_the_late_rank_is_named(runs: Any, size: int) -> None:
    run = runs.made(size)
    told = summary(run)
    assert told.straggler == (size - 1, 2 * 3 * MS * (size - 1))
    assert told.steps == 2
    text = run_svg(run, windows(run)[-1], style=run_style())
    assert f"Rank {size - 1} came last" in text
    root = ET.fromstring(text)
    arrows = [path for path in root.iter(f"{NS}path") if path.get("class") == "arrow"]
    assert len(arrows) == size - 1 + 1  # and one in the legend


def test_what_computing_hides(runs: Any) -> None:
    # Each bucket takes 5 ms, of which backward goes on for 1; the late one's takes 2.
    told = summary(runs.made(2))
    assert [one.overlap for one in told.ranks] == [pytest.approx(1 / 5), pytest.approx(1 / 2)]
    assert [one.background for one in told.ranks] == [2 * 5 * MS, 2 * 2 * MS]


@pytest.mark.parametrize("size", [1, 2, 7])
def test_every_part_lies_inside_the_drawing(runs: Any, size: int) -> None:
    run = runs.made(size)
    for window in windows(run):
        root = ET.fromstring(run_svg(run, window))
        width, height = (float(root.get(name, "0")) for name in ("width", "height"))
        for part in root.iter(f"{NS}rect"):
            x, y = float(part.get("x", "0")), float(part.get("y", "0"))
            assert 0 <= x <= x + float(part.get("width", "0")) <= width + 1
            assert 0 <= y <= y + float(part.get("height", "0")) <= height


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_legend_of_every_kind_lies_inside(runs: Any, language: Language) -> None:
    kinds = [kind for kind in KINDS if kind not in ("gather", "phase", "call")]
    events = [runs.event(number + 1, kind, number, number + 0.5)
              for number, kind in enumerate(kinds)]  # fmt: skip
    events.append(runs.call(20, 9, 9.5))
    record = RankRecord(0, 1, 100, "", "x.py", b"", "", 0, 0, 9, {0: (0, 1)}, events)
    run = RunRecord([record], 1, 0, 10 * MS)
    root = ET.fromstring(run_svg(run, windows(run, every=True)[-1], language=language))
    last = list(root.iter(f"{NS}text"))[-1]
    wide = sum(13 if character > "\u2e80" else 7 for character in last.text or "")
    assert float(last.get("x", "0")) + wide <= float(root.get("width", "0"))


def test_steps_are_windows(runs: Any) -> None:
    run = runs.made(3)
    assert [(one.key, one.start, one.end) for one in windows(run)] == [
        ("step-1", 0, 15 * MS),
        ("step-2", 20 * MS, 35 * MS),
    ]


def test_a_step_is_each_rank_s_own(runs: Any) -> None:
    # Rank 1 begins its second step while rank 0 is still in the first, and rank 2 died in it.
    ranks = []
    for rank, shift in enumerate((0, -4, 0)):
        events = []
        for step in range(2):
            at, dies = 10 * step + shift * step, rank == 2 and step == 1
            events += [
                runs.event(10 * step + 1, "forward", at, at + 2, call=step),
                runs.call(10 * step + 2, at + 3, at + 4, call=step + 1, waited=MS),
                runs.call(10 * step + 3, at + 6, None if dies else at + 8, call=step + 1,
                          thread=101, asked=int((at + 4) * MS)),
            ]  # fmt: skip
            if not dies:
                events.append(runs.event(10 * step + 4, "step", at + 4, at + 5, call=step))
        ranks.append(RankRecord(rank, 3, 100, "", "x.py", b"", "", 0, 0, 8, {0: (rank, 3)}, events))
    run = RunRecord(ranks, 3, 0, 30 * MS)
    first, second = windows(run)
    assert (second.start, second.end) == (6 * MS, 15 * MS)
    for window in (first, second):
        told = summary(run, window)
        assert told.steps == 1
        assert [(one.calls, one.in_calls) for one in told.ranks] == [(2, MS)] * 3
    # Rank 1's call that began after its first step lies in its second, where its time is.
    assert [one.background for one in summary(run, second).ranks] == [0, 2 * MS, 0]
    assert [one.phases.get("step") for one in summary(run, second).ranks] == [MS, MS, None]


def test_a_rank_without_a_step_has_nothing_in_it(runs: Any) -> None:
    run = runs.made(3)
    ranks = [*run.ranks[:2], dataclasses.replace(run.ranks[2], events=run.ranks[2].events[:6])]
    shorter = dataclasses.replace(run, ranks=ranks)
    told = summary(shorter, windows(shorter)[-1])
    assert [one.calls for one in told.ranks] == [2, 2, 0]
    assert told.steps == 1
    assert "<svg" in run_svg(shorter, windows(shorter)[-1])


def test_without_steps_there_is_one_window(runs: Any) -> None:
    events = [runs.call(number, number, number + 0.5) for number in range(1, 1001)]
    record = RankRecord(0, 1, 100, "", "x.py", b"", "", 0, 0, 1000, {0: (0, 1)}, events)
    run = RunRecord([record], 1, 0, 1001 * MS)
    [window] = windows(run)
    assert window.name == "the last 400 events"
    assert run_svg(run, window).count("<rect") > 400


def test_strangers_names_are_text(runs: Any, hostile: str) -> None:
    page = run_page(runs.made(2, name=hostile, site=hostile))
    assert len(re.findall(r"<script", page)) == 1
    assert "<img" not in page
    assert "onerror=alert(1)>" not in page.replace("&gt;", "")
    for window in windows(runs.made(2)):
        ET.fromstring(run_svg(runs.made(2, name=hostile, site=hostile), window, style=run_style()))


@pytest.mark.parametrize("width", [1400, 400])
def test_the_page_steps_in_a_browser(runs: Any, visit: Callable[..., Page], width: int) -> None:
    page = visit(run_page(runs.made(4)), width=width)
    shown = page.locator("section:not([hidden])")
    assert shown.get_attribute("id") == "step-2"
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("section#step-1:not([hidden])")  # what is shown comes after the address
    assert shown.get_attribute("id") == "step-1"
    page.get_by_label("Next step").click()
    page.wait_for_selector("section#step-2:not([hidden])")
    assert page.evaluate("location.hash") == "#step-2"
    page.wait_for_selector("nav a[href='#step-2'][aria-current]")
    assert page.locator("nav a[aria-current]").inner_text() == "step 2"
    # The page itself never scrolls sideways; the drawing does.
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_waits_are_drawn_in_a_browser(runs: Any, visit: Callable[..., Page], scheme: str) -> None:
    page = visit(run_page(runs.made(3)), color_scheme=scheme)
    waits = page.locator("section:not([hidden]) rect.wait")
    assert waits.count() > 2
    fill = waits.first.evaluate("one => getComputedStyle(one).fill")
    assert "wait" in fill
    # Patterns of what is not displayed are not drawn.
    assert page.evaluate("document.getElementById('wait').closest('section') === null")
