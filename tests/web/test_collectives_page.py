"""The view Collectives in a real browser: what it shows is what Python says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.schedule import Schedule, to_json
from roundelay.view import Picture, picture
from roundelay.view.captions import costs
from roundelay.web.costs import priced, prices_of

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route
    from tests.web.conftest import Served

pytestmark = pytest.mark.browser

CELLS = """index => Object.fromEntries(
  [...document.querySelectorAll(`[data-picture="${index}"] td[data-cell]`)]
    .filter(cell => cell.textContent)
    .map(cell => [cell.dataset.cell, [cell.title || cell.textContent,
      cell.classList.contains("done")]]))"""
STATUS = {"en": "Step {n} of {last}", "zh": "第 {n} 步，共 {last} 步"}


def wait_for(page: Page, selector: str, text: str) -> None:
    """Wait until what is shown there has this text in it."""
    page.locator(selector, has_text=text).first.wait_for()


def until(page: Page, expression: str, wanted: Any) -> None:
    """Wait until the page says so; Playwright's own waiting evaluates strings, which it forbids."""
    limit = time.monotonic() + 100
    while (found := page.evaluate(expression)) != wanted:
        assert time.monotonic() < limit, found
        time.sleep(0.05)


def show_map(page: Page) -> None:
    """Go down to the map of who wins, which is drawn when it comes near."""
    page.locator("#status").wait_for()  # what is above it is there, and nothing moves any more
    page.locator(".prices tbody tr").first.wait_for()
    page.locator(".two").scroll_into_view_if_needed()
    page.locator(".win").first.wait_for()


def drawn(name: str, size: int, **options: Any) -> Picture:
    schedule = algorithms.load(name).schedule(size)
    return picture(schedule, price=priced(schedule, 1 << 20, "switch"), **options)


def expect(page: Page, frames: Picture, number: int, index: int = 0) -> None:
    """Hold what every cell of the table shows against a frame."""
    frame = frames.frames[min(number, len(frames.frames) - 1)]
    assert page.evaluate(CELLS, index) == {
        f"{rank}-{chunk}": [view.text, view.done] for (rank, chunk), view in frame.cells.items()
    }


@pytest.mark.parametrize("language", ["en", "zh"])
def test_steps_a_ring(language: str, visit_web: Callable[..., Page]) -> None:
    ring = drawn("all_reduce_ring", 5, language=language)
    page = visit_web(f"/collectives?ranks=5&lang={language}")
    page.locator("#status").wait_for()
    for number in range(1, 9):
        page.keyboard.press("ArrowRight")
        wait_for(page, "#status", STATUS[language].format(n=number, last=8))
        expect(page, ring, number)
        assert page.inner_text(".words") == ring.story.words[number]
    shown = page.evaluate("[...document.querySelectorAll('.costs > div')].map(d => d.innerText)")
    assert shown == [f"{label}\n{amount}" for label, amount in costs(ring)]
    assert "step=8" in page.evaluate("location.hash")
    page.keyboard.press("Home")
    expect(page, ring, 0)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_compares_two(language: str, visit_web: Callable[..., Page]) -> None:
    page = visit_web(f"/collectives?ranks=6&lang={language}")
    label = {"en": "Beside it", "zh": "与之对比"}[language]
    page.get_by_label(label, exact=True).select_option("tree")
    page.locator('[data-picture="1"]').wait_for()
    ring, tree = drawn("all_reduce_ring", 6), drawn("all_reduce_tree", 6)
    for number in range(11):
        expect(page, ring, number, 0)
        expect(page, tree, number, 1)
        page.keyboard.press("ArrowRight")
    assert "compare=tree" in page.evaluate("location.hash")
    joined = {
        "en": "all_reduce_ring and all_reduce_tree",
        "zh": "all_reduce_ring 与 all_reduce_tree",
    }
    assert page.inner_text("h1").startswith(joined[language])


@pytest.mark.parametrize("language", ["en", "zh"])
def test_refutes_a_broken_schedule(language: str, visit_web: Callable[..., Page]) -> None:
    ring = algorithms.load("all_reduce_ring").schedule(4)
    kept = [transfer for index, transfer in enumerate(ring.transfers) if index != 9]
    broken = Schedule(ring.collective, 4, kept, parts=4, name="<b>a ring with a hole</b>")
    frames = picture(broken)
    first = min(frames.failures_by_frame())

    page = visit_web(f"/collectives?own=yes&lang={language}")
    page.locator("#pasted").fill(to_json(broken))
    page.locator("#prove").click()
    wait_for(page, ".proof.bad", "<b>a ring with a hole</b>")
    refuted = {"en": f"breaks at step {first}.", "zh": f"在第 {first} 步出错"}
    assert refuted[language] in page.inner_text(".proof.bad")
    wait_for(page, "#status.failing", STATUS[language].format(n=first, last=6))
    assert page.locator(".panel.failing td.bad").count() > 0
    marks = page.evaluate("[...document.querySelectorAll('#marks i')].map(m => +m.dataset.frame)")
    assert sorted(marks) == sorted(frames.failures_by_frame())
    expect(page, frames, first)
    assert page.locator("main b").count() == 2  # those of the legend

    page.locator("#take-this").click()
    until(
        page,
        """document.querySelector("#pasted").value.includes('"all_reduce_ring"')""",
        wanted=True,
    )
    page.locator("#prove").click()
    wait_for(page, ".proof.good", "all_reduce_ring")
    assert page.locator(".panel.failing, #marks i").count() == 0


def test_a_late_answer_leaves_the_field_to_whom_is_in_it(visit_web: Callable[..., Page]) -> None:
    """The page puts a schedule in by itself; somebody may be quicker, and paste another."""
    held: list[Route] = []
    page = visit_web("/collectives")
    page.locator("#status").wait_for()

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/api/collectives/text*", hold)
    page.get_by_text("Your own", exact=True).click()
    page.locator("#pasted").focus()
    until_held(page, held)
    with page.expect_response("**/api/collectives/text*"):
        held[0].continue_()
    page.wait_for_timeout(100)
    page.keyboard.insert_text("{}")
    assert page.input_value("#pasted") == "{}"


def until_held(page: Page, held: list[Route]) -> None:
    limit = time.monotonic() + 100
    while not held:
        assert time.monotonic() < limit
        page.wait_for_timeout(20)


def test_what_is_no_schedule_is_told_where(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/collectives?own=yes", refused=True)
    page.locator("#pasted").fill('{"roundelay": 1, "size": "four"}')
    page.locator("#prove").click()
    wait_for(page, "#trouble", "schedule")


ROWS = """() => [...document.querySelectorAll(".prices tbody tr")].map(row => [
  row.dataset.algorithm, ...[...row.querySelectorAll("td")].map(cell => cell.innerText.trim())])"""


def test_prices_follow_ranks_bytes_and_network(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/collectives")
    for network, ranks, power in (("switch", 4, 20), ("h100-ib", 16, 26), ("ring", 7, 10)):
        page.get_by_label("Network", exact=True).select_option(network)
        page.get_by_label("Ranks", exact=True).fill(str(ranks))
        page.get_by_label("Buffer", exact=True).fill(str(power))
        wait_for(page, ".card-section .about", f"{ranks} ranks")
        rows = prices_of(collectives.load("all_reduce"), ranks, 0, 1 << power, network)["rows"]
        order = {"rank_order": "rank order", "contiguous": "neighbours", "any": "other"}
        expected = [
            [row["algorithm"], row["time"], str(row["steps"]), str(row["messages"]), row["sent"],
             order[row["order"]]]
            for row in rows
        ]  # fmt: skip
        until(page, ROWS, expected)
        address = page.evaluate("location.hash")
        assert f"bytes={1 << power}" in address or power == 20
    slowest = expected[-1][0]
    page.get_by_role("button", name=f"Show {slowest}").click()
    wait_for(page, "h1", f"all_reduce_{slowest} on 7 ranks")


def test_the_map_says_who_wins(served: Served, visit_web: Callable[..., Page]) -> None:
    page = visit_web("/collectives?collective=all_gather&network=a100-ib")
    show_map(page)
    told = served.get("/api/collectives/crossover?collective=all_gather&network=a100-ib").document
    shown = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.win')].map("
        "w => [`${w.dataset.ranks} ${w.dataset.bytes}`, w.dataset.best]))"
    )
    assert shown == {
        f"{ranks} {nbytes}": told["best"][row][column][0][0]
        for row, ranks in enumerate(told["ranks"])
        for column, nbytes in enumerate(told["bytes"])
    }
    for ranks, nbytes in ((8, 1 << 10), (64, 1 << 30)):
        schedules = {
            each.short_name: priced(each.schedule(ranks), nbytes, "a100-ib").seconds or 0.0
            for each in algorithms
            if each.collective.name == "all_gather"
        }
        assert schedules[shown[f"{ranks} {nbytes}"]] == min(schedules.values())
    page.locator('.win[data-ranks="8"][data-bytes="16384"]').click()
    wait_for(page, "h1", "all_gather_ring on 8 ranks")
    assert "bytes=16384" in page.evaluate("location.hash")
    cell = page.locator('.win[data-ranks="2"][data-bytes="256"]')
    cell.focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    wait_for(page, "h1", "all_gather_ring on 3 ranks")
    assert "bytes=1024" in page.evaluate("location.hash")


def test_real_numbers_are_added_up(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/collectives")
    page.get_by_label("Real numbers", exact=True).fill("1,5 2,6 3,7 4,9")
    page.keyboard.press("Enter")
    wait_for(page, "h1", "all_reduce_ring on 4 ranks, sum")
    page.get_by_label("Reduction", exact=True).select_option("max")
    wait_for(page, "h1", "4 ranks, max")
    page.locator("h1").click()
    page.keyboard.press("End")
    cells = page.evaluate(CELLS, 0)
    assert {cells[f"{rank}-{chunk}"][0] for rank in range(4) for chunk in (0, 1)} == {"[4]", "[9]"}


def test_rooted_collectives_have_a_root(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/collectives")
    assert page.get_by_label("Root", exact=True).is_hidden()
    page.get_by_label("Collective", exact=True).select_option("broadcast")
    page.get_by_label("Root", exact=True).fill("2")
    wait_for(page, "h1", "broadcast_binomial on 4 ranks, root 2")
    assert list(page.evaluate(CELLS, 0)) == ["2-0"]


SEEN = """() => [location.hash, ...["h1", ".choices", "#panels", ".prices"].map(
  selector => document.querySelector(selector).innerText)]"""


def test_an_address_brings_everything_back(visit_web: Callable[..., Page]) -> None:
    page = visit_web(
        "/collectives?collective=reduce&algorithm=two_shot&ranks=6&root=3&bytes=4096"
        "&network=torus&compare=direct&step=2&lang=zh"
    )
    wait_for(page, "#status", "第 2 步")
    page.locator(".prices tbody tr").first.wait_for()
    before = page.evaluate(SEEN)
    page.reload()
    wait_for(page, "#status", "第 2 步")
    page.locator(".prices tbody tr").first.wait_for()
    assert page.evaluate(SEEN) == before


def test_arrows_in_a_field_are_the_fields(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/collectives?step=2")
    wait_for(page, "#status", "Step 2")
    page.get_by_label("Real numbers", exact=True).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Home")
    page.keyboard.type(" ")
    assert "Step 2" in page.inner_text("#status")
    page.locator("h1").click()
    page.keyboard.press("ArrowRight")
    wait_for(page, "#status", "Step 3")


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize(
    "state", ["ranks=8", "compare=tree&step=2", "own=yes", "collective=barrier"]
)
def test_fits_the_window(
    state: str, width: int, language: str, visit_web: Callable[..., Page]
) -> None:
    page = visit_web(f"/collectives?{state}&lang={language}", width=width)
    page.locator("h1").wait_for()
    if "own" in state:
        page.locator("#pasted").wait_for()
    else:
        show_map(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_is_in_the_address_as_json_can_be(served: Served) -> None:
    found = served.get("/api/collectives/pictures?ranks=3&lang=zh").document
    assert json.dumps(found)
    assert found["pictures"][0]["words"][0].startswith("All-reduce（全规约）")
