"""The page in a real browser, opened from disk: what it shows is what the Picture says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from roundelay.view.html import html

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from roundelay.view import Picture

pytestmark = pytest.mark.browser

SHOWN = """index => Object.fromEntries(
  [...document.querySelectorAll(`[data-picture="${index}"] td[data-cell]`)]
    .map(cell => [cell.dataset.cell, [cell.title || cell.textContent,
      cell.classList.contains("done"), cell.classList.contains("changed")]]))"""
#: All that is held against a frame, in one question.
PANEL = f"""index => {{
  const panel = document.querySelector(`[data-picture="${{index}}"]`);
  const all = selector => [...panel.querySelectorAll(selector)];
  return [({SHOWN})(index), all(".lines .arrow").length,
          all(".messages li").map(line => line.innerText), all(".spot:not(.empty)").length];
}}"""
WINDOWS = [(1280, 800), (390, 844)]


def expect(page: Page, picture: Picture, number: int, *, index: int = 0) -> None:
    """Hold every cell of the table, every arrow and every line against one frame."""
    frame = picture.frames[min(number, len(picture.frames) - 1)]
    shown, arrows, words, filled = page.evaluate(PANEL, index)
    held = {key: cell for key, cell in shown.items() if cell[0]}
    assert held == {
        f"{rank}-{chunk}": [view.text, view.done, (rank, chunk) in frame.changed]
        for (rank, chunk), view in frame.cells.items()
    }
    pairs = {(transfer.src, transfer.dst) for transfer in frame.transfers}
    assert arrows == len(pairs)
    heads = [f"{picture.ranks[src]} → {picture.ranks[dst]}: " for src, dst in pairs]
    assert len(words) == len(heads)
    assert all(any(line.startswith(head) for line in words) for head in heads)
    assert filled == len(frame.cells)


def status(page: Page) -> str:
    return page.locator("#status").inner_text()


@pytest.mark.parametrize(
    ("name", "size"),
    [("all_reduce_ring", 5), ("all_reduce_halving_doubling", 6), ("all_to_all_bruck", 5)],
)
def test_steps_there_and_back(
    name: str, size: int, drawn: Callable[..., Picture], visit: Callable[..., Page]
) -> None:
    picture = drawn(name, size)
    page = visit(html([picture]))
    last = len(picture.frames) - 1

    expect(page, picture, 0)
    for number in range(1, last + 1):  # forward by button
        page.click("#next")
        assert status(page) == f"Step {number} of {last}"
        expect(page, picture, number)
    page.click("#next", force=True)  # at the end it says that it is disabled, and does nothing
    assert status(page) == f"Step {last} of {last}"

    for number in range(last - 1, -1, -1):  # back by keyboard
        page.keyboard.press("ArrowLeft")
        expect(page, picture, number)
    page.keyboard.press("ArrowLeft")
    assert status(page).startswith("Start")

    for number in (last, 1, last - 1, 0, last // 2):  # anywhere by slider
        page.locator("#slider").fill(str(number))
        expect(page, picture, number)
    for key, number in (("End", last), ("Home", 0), ("ArrowRight", 1)):
        page.keyboard.press(key)
        expect(page, picture, number)
    for button, number in (("#last", last), ("#first", 0), ("#next", 1), ("#prev", 0)):
        page.click(button)
        expect(page, picture, number)


def test_ends_with_the_sum_everywhere(
    drawn: Callable[..., Picture], visit: Callable[..., Page]
) -> None:
    page = visit(html([drawn("all_reduce_ring", 5)]))
    page.keyboard.press("End")
    shown = page.evaluate(SHOWN, 0)
    assert len(shown) == 25
    for key, (text, done, _) in shown.items():
        letter = "abcde"[int(key.partition("-")[2])]
        assert sorted(text.split("+")) == [f"{letter}{rank}" for rank in range(5)]
        assert done


LABELS = """() => {
  const play = document.querySelector("#play"), seen = [];
  new MutationObserver(() => {
    seen.push(play.getAttribute("aria-label"));
    play.dataset.seen = seen.join(" ");
  }).observe(play, {attributes: true, attributeFilter: ["aria-label"]});
}"""


def test_plays_to_the_end(drawn: Callable[..., Picture], visit: Callable[..., Page]) -> None:
    picture = drawn("all_reduce_two_shot", 3)
    page = visit(html([picture]), reduced_motion="reduce")
    page.evaluate(LABELS)  # noted as they come: it may be over before we look
    page.keyboard.press("Space")
    page.locator("#play[data-seen='Pause Play']").wait_for()
    assert status(page) == "Step 2 of 2"
    expect(page, picture, 2)


def test_tells_a_transfer(drawn: Callable[..., Picture], visit: Callable[..., Page]) -> None:
    page = visit(html([drawn("all_reduce_ring", 5)]))
    page.keyboard.press("ArrowRight")
    line = page.locator(".messages li").first
    told = "GPU0 → GPU1: a (reduce). GPU1 then holds a0+a1"
    assert line.inner_text() == "GPU0 → GPU1: a (reduce)"

    for target in (line, page.locator(".label").first):
        target.hover()
        assert page.locator(".hint").inner_text() == told
        hot = page.evaluate("[...document.querySelectorAll('td.hot')].map(c => c.dataset.cell)")
        assert sorted(hot) == ["0-0", "1-0"]
        assert page.locator(".arrow.hot").count() == 1
        page.mouse.move(5, 5)
        assert page.locator(".hot").count() == 0

    line.focus()
    assert page.locator(".hint").inner_text() == told
    page.keyboard.press("ArrowDown")
    assert page.locator(".hint").inner_text().startswith("GPU1 → GPU2: b (reduce)")


@pytest.mark.parametrize(("width", "height"), WINDOWS)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("all_reduce_ring", 1),
        ("broadcast_direct", 2),
        ("all_reduce_ring", 5),
        ("all_to_all_bruck", 5),
        ("all_reduce_one_shot", 8),
        ("all_reduce_ring", 16),
        ("all_reduce_ring", 48),
    ],
)
def test_fits_the_window(
    name: str,
    size: int,
    width: int,
    height: int,
    drawn: Callable[..., Picture],
    visit: Callable[..., Page],
) -> None:
    page = visit(html([drawn(name, size)]), width=width, height=height)
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cards = page.evaluate(
        "[...document.querySelectorAll('.card')].map(c => c.getBoundingClientRect())"
        ".map(({left, right, top, bottom}) => [left, right, top, bottom])"
    )
    assert len(cards) == size
    for index, (left, right, top, bottom) in enumerate(cards):
        assert 0 <= left < right <= width
        for other in cards[index + 1 :]:
            apart = left >= other[1] or other[0] >= right or top >= other[3] or other[2] >= bottom
            assert apart


def test_large_tables_show_short_sums(
    drawn: Callable[..., Picture], visit: Callable[..., Page]
) -> None:
    page = visit(html([drawn("all_reduce_ring", 16)]))
    page.keyboard.press("End")
    cell = page.locator('td[data-cell="0-0"]')
    assert cell.inner_text() == "a0…15"
    assert cell.get_attribute("title") == "+".join(f"a{rank}" for rank in range(16))


@pytest.mark.parametrize(("width", "height"), WINDOWS)
def test_two_share_one_slider(
    width: int, height: int, drawn: Callable[..., Picture], visit: Callable[..., Page]
) -> None:
    ring, tree = drawn("all_reduce_ring", 5), drawn("all_reduce_tree", 5)
    page = visit(html([ring, tree]), width=width, height=height)
    last = max(len(ring.frames), len(tree.frames)) - 1
    for number in range(last + 1):
        expect(page, ring, number, index=0)
        expect(page, tree, number, index=1)
        page.keyboard.press("ArrowRight")
    assert status(page) == f"Step {last} of {last}"
    tops = page.evaluate("[...document.querySelectorAll('.panel')].map(p => p.offsetTop)")
    assert (tops[0] == tops[1]) == (width > 900)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_failing_steps_are_marked(broken: Picture, visit: Callable[..., Page]) -> None:
    page = visit(html([broken]))
    last = len(broken.frames) - 1
    failing = sorted({last if f.step is None else f.step + 1 for f in broken.failures})
    marks = page.evaluate("[...document.querySelectorAll('#marks i')].map(m => m.dataset.frame)")
    assert sorted(map(int, marks)) == failing
    assert "does not keep its contract" in page.locator(".verdict").inner_text()

    for number in range(last + 1):
        fails = number in failing
        assert status(page).endswith("fails") == fails
        assert (page.locator(".panel.failing").count() == 1) == fails
        assert (page.locator(".problems li").count() > 0) == fails
        assert (page.locator("td.bad").count() > 0) == fails
        page.keyboard.press("ArrowRight")
    page.locator(".verdict button").first.click()
    assert status(page).startswith(f"Step {failing[0]} ")


def test_hostile_titles_run_nothing(
    hostile: str, drawn: Callable[..., Picture], visit: Callable[..., Page]
) -> None:
    picture = drawn("broadcast_direct", 3, title=hostile, rank_name=hostile)
    page = visit(html([picture]))
    page.on("dialog", lambda dialog: pytest.fail(f"the page says {dialog.message}"))
    page.keyboard.press("ArrowRight")
    assert page.locator("img, script:not([type]) ~ script").count() == 0
    assert page.locator(".messages li").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


CONTRASTS = """selectors => {
  const paint = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const mix = colours => {
    for (const colour of colours) { paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1); }
    const linear = [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3).map(c => c / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const behind = element => element ? [...behind(element.parentElement),
                                       getComputedStyle(element).backgroundColor] : ["white"];
  return selectors.flatMap(selector => [...document.querySelectorAll(selector)].map(element => {
    const ground = behind(element);
    const [low, high] = [mix(ground), mix([...ground, getComputedStyle(element).color])]
      .sort((one, other) => one - other);
    return [selector, (high + 0.05) / (low + 0.05)];
  }));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(
    scheme: Any,  # one of playwright's literals
    broken: Picture,
    visit: Callable[..., Page],
) -> None:
    page = visit(html([broken]), color_scheme=scheme)
    page.keyboard.press("End")
    texts = ["h1", "#about", "#status", "td", "td.done", "dt", "dd", ".hint", ".verdict", "th"]
    found = page.evaluate(CONTRASTS, [*texts, ".problems li", ".messages li", "footer", "#play"])
    assert {selector for selector, _ in found} >= {*texts}
    assert [pair for pair in found if pair[1] < 4.5] == []


def test_dark_readers_get_a_dark_page(
    drawn: Callable[..., Picture], visit: Callable[..., Page]
) -> None:
    text = html([drawn("all_reduce_ring", 3)])
    grounds = [
        visit(text, color_scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    light, dark = (sum(map(int, ground[4:-1].split(","))) for ground in grounds)
    assert light > 600
    assert dark < 150


def test_controls_have_names(drawn: Callable[..., Picture], visit: Callable[..., Page]) -> None:
    page = visit(html([drawn("all_reduce_ring", 3)]))
    for name in ("First (Home)", "Previous step (left arrow)", "Play", "Last (End)"):
        assert page.get_by_role("button", name=name).count() == 1
    assert page.get_by_role("slider", name="Step").count() == 1
    assert page.locator("#status").get_attribute("aria-live") == "polite"
    page.keyboard.press("Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
