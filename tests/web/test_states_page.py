"""Wrong addresses: an error stands alone, every view recovers, and nothing is swallowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.browser

#: Of each view: a state that is right, one that is refused, what is said of it, and the result.
STATES = [
    ("/collectives?ranks=3", "/collectives?ranks=-1", "ranks is a whole number from 1 to 64, not '-1'", "#panels, .prices"),  # noqa: E501
    ("/collectives", "/collectives?collective=foo", "collective has no 'foo'", "#panels, .prices"),
    ("/training?ranks=2", "/training?strategy=foo", "strategy has no 'foo'", ".strategy, .player"),
    ("/training", "/training?ranks=1e9", "ranks is a whole number from 1 to 8, not '1e9'", ".strategy, .player"),  # noqa: E501
    ("/training?strategy=zero2", "/training?compare=foo", "strategy has no 'foo'", ".strategy"),
    ("/axes?show=pipeline", "/axes?show=pipeline&ranks=99", "ranks is a whole number from 1 to 16", ".sheet-of, h2, .command"),  # noqa: E501
    ("/planner", "/planner?params=foo", "params is a number from", ".best, .plan, .curve, .why"),
    ("/tour?chapter=7", "/tour?chapter=7&ranks=5e9", "ranks is a whole number from 1 to 1024", ".zero-rows"),  # noqa: E501
    ("/tour?chapter=5", "/tour?chapter=5&bytes=x", "bytes is a whole number", ".prices"),
]  # fmt: skip


def go(page: Page, address: str) -> None:
    page.evaluate("to => { location.hash = to }", f"#{address}")


HIDDEN = "of => [...document.querySelectorAll(of)].every((one) => !one.checkVisibility())"


@pytest.mark.parametrize(("good", "bad", "said", "result"), STATES)
def test_an_error_is_alone_and_goes_away(
    good: str, bad: str, said: str, result: str, visit_web: Callable[..., Page]
) -> None:
    page = visit_web(bad, refused=True)  # the first that is seen of the view
    trouble = page.locator("#trouble", has_text=said)
    for _ in range(2):
        trouble.wait_for()
        page.wait_for_function(HIDDEN, arg=result)  # each part is a question of its own
        go(page, good)
        page.locator(result).first.wait_for()
        page.locator("#trouble").wait_for(state="hidden")
        go(page, bad)
    trouble.wait_for()
    page.wait_for_function(HIDDEN, arg=result)
    address = page.evaluate("location.hash")
    page.keyboard.press("ArrowRight")  # nobody steps through what is hidden
    assert page.evaluate("location.hash") == address


def test_a_control_leads_out_of_an_error(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/training?strategy=foo", refused=True)
    page.locator("#trouble", has_text="foo").wait_for()
    page.get_by_label("Strategy").select_option("zero3")
    page.locator(".strategy h2", has_text="ZeRO-3").wait_for()
    page.locator("#trouble").wait_for(state="hidden")


def test_an_error_belongs_to_its_state(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/collectives?ranks=-1", refused=True)
    page.locator("#trouble", has_text="ranks").wait_for()
    go(page, "/collectives?own=yes")
    page.locator("#pasted").wait_for()
    page.locator("#trouble").wait_for(state="hidden")
    go(page, "/nowhere")
    page.locator("#trouble", has_text="nowhere").wait_for()
    assert page.locator("#main").inner_text() == ""
    go(page, "/%")
    page.locator("#trouble", has_text="%").wait_for()


def test_an_error_that_comes_late_is_not_told(visit_web: Callable[..., Page]) -> None:
    page = visit_web(
        "/tour", refused=True, height=4000
    )  # room for the map, so that it is asked for
    held: list[Route] = []
    page.route("**/prices?collective=foo*", lambda route: held.append(route))  # noqa: PLW0108
    with page.expect_request("**/crossover?collective=foo*"):
        page.route("**/crossover?collective=foo*", lambda route: held.append(route))  # noqa: PLW0108
        go(page, "/collectives?collective=foo")
    page.locator("#trouble", has_text="collective has no 'foo'").wait_for()
    go(page, "/collectives?own=yes")
    page.locator("#pasted").wait_for()
    page.locator("#trouble").wait_for(state="hidden")
    for route in held:
        with page.expect_event("requestfinished"):
            route.continue_()
    page.wait_for_timeout(300)  # the page takes what came
    assert page.locator("#trouble").is_hidden()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("/collectives?lang=xx", "#/collectives"),
        ("/collectives?own=maybe", "#/collectives"),
        ("/collectives?step=abc", "#/collectives"),
        ("/collectives?step=2.5", "#/collectives"),
        ("/collectives?step=9999", "#/collectives?step=6"),
        ("/training?step=abc", "#/training"),
        ("/tour?chapter=0", "#/tour"),
        ("/tour?chapter=x", "#/tour"),
        ("/tour?chapter=99", "#/tour"),
        ("/tour?chapter=2&collective=foo", "#/tour?chapter=2"),
        ("/axes?show=foo", "#/axes"),
        ("/axes?step=-1", "#/axes"),
        ("/planner?why=maybe", "#/planner"),
        ("/timelines?show=foo", "#/timelines"),
    ],
)
def test_the_address_says_what_is_shown(
    given: str, shown: str, visit_web: Callable[..., Page]
) -> None:
    page = visit_web(given)
    page.wait_for_function("shown => location.hash === shown", arg=shown)
    first = shown.partition("?")[0][1:]
    go(page, first)  # and once the view is there
    page.wait_for_function("to => location.hash === to", arg=f"#{first}")
    go(page, given)
    page.wait_for_function("shown => location.hash === shown", arg=shown)
    assert page.locator("#trouble").is_hidden()


OUTSIDE = """() => {
  const svg = document.querySelector("svg.crossover"), around = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map((one) => one.getBoundingClientRect());
  const turned = texts.at(-1), ticks = texts.slice(0, -2);
  return { out: texts.filter((one) => one.left < around.left || one.right > around.right || one.bottom > around.bottom).length,
           gap: Math.min(...ticks.map((one) => one.left)) - turned.right };
}"""  # noqa: E501


def test_the_map_says_that_it_computes_and_fits(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/tour", width=400)
    page.route("**/api/collectives/crossover*", lambda _: None)  # never answered
    go(page, "/collectives")
    page.locator(".card-section", has_text="Computing").wait_for()
    page.unroute("**/api/collectives/crossover*")
    page.reload()
    page.locator(".prices").wait_for()
    page.locator(".two").scroll_into_view_if_needed()
    page.locator(".win").first.wait_for()
    found = page.evaluate(OUTSIDE)
    assert found["out"] == 0
    assert found["gap"] > 0
    go(page, "/collectives?collective=broadcast")
    page.locator(".win[data-best]").first.wait_for()


CUT = """() => [...document.querySelectorAll("select")].filter((one) => one.checkVisibility()).flatMap((one) => {
  const pen = document.createElement("canvas").getContext("2d"), style = getComputedStyle(one);
  pen.font = style.font;
  const room = one.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - 16;
  return [...one.options].filter(({ text }) => pen.measureText(text).width > room).map(({ text }) => text);
})"""  # noqa: E501


@pytest.mark.parametrize("width", [400, 640, 1000])
def test_names_of_strategies_are_read_whole(width: int, visit_web: Callable[..., Page]) -> None:
    page = visit_web("/training?compare=ps-ssp", width=width)
    page.locator(".strategy").first.wait_for()
    assert page.evaluate(CUT) == []


CONTRAST = """element => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (...colours) => {
    for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((one) => one / 255).map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const grounds = [];
  for (let one = element; one; one = one.parentElement) grounds.unshift(getComputedStyle(one).backgroundColor);
  const ground = light(over("white", ...grounds)), ink = light(over(getComputedStyle(element).color));
  return (Math.max(ground, ink) + 0.05) / (Math.min(ground, ink) + 0.05);
}"""  # noqa: E501


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_best_can_be_read(scheme: str, visit_web: Callable[..., Page]) -> None:
    page = visit_web("/planner", color_scheme=scheme)
    for selector in (".best b", ".plan .mark"):
        found = page.locator(selector).first
        found.wait_for()
        assert found.evaluate(CONTRAST) >= 4.5, selector
