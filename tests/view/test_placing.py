"""Where the page puts ranks, arrows and words, measured in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from roundelay.algorithms import algorithms
from roundelay.networks import networks
from roundelay.view import picture
from roundelay.view.html import html

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from roundelay.view import Picture

pytestmark = pytest.mark.browser

WIDTHS = [1400, 800, 400]
CARDS = """() => [...document.querySelectorAll(".card")].map(card => {
  const {left, right, top, bottom} = card.querySelector(".sheet").getBoundingClientRect();
  return [Number(card.querySelector("text").textContent.slice(3)), left, right, top, bottom];
})"""
ARROWS = (
    """() => [...document.querySelectorAll(".lines .line")].map(line => line.getTotalLength())"""
)
SPILLED = """() => [...document.querySelectorAll(".spot text")].filter(text => {
  const cell = text.parentElement.querySelector(".base").getBoundingClientRect();
  const {left, right} = text.getBoundingClientRect();
  return left < cell.left - 1 || right > cell.right + 1;
}).map(text => text.textContent)"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("name", ["all_reduce_tree", "broadcast_binomial"])
def test_parents_stand_before_their_children(
    name: str, size: int, width: int, drawn: Callable[..., Picture], visit: Callable[..., Page]
) -> None:
    image = drawn(name, size)
    page = visit(html([image]), width=width)
    at = {rank: (left, top) for rank, left, _, top, _ in page.evaluate(CARDS)}
    (tree,) = image.shape.trees
    pairs = [(at[up], at[rank]) for rank, up in enumerate(tree.parents) if up is not None]
    downwards = all(above[1] < below[1] for above, below in pairs)
    assert downwards or all(above[0] < below[0] for above, below in pairs)
    assert downwards or width < 600


@pytest.mark.parametrize("width", [1400, 400])
def test_two_trees_share_no_card(
    width: int, drawn: Callable[..., Picture], visit: Callable[..., Page]
) -> None:
    page = visit(html([drawn("all_reduce_double_binary_tree", 8)]), width=width)
    cards = page.evaluate(CARDS)
    assert sorted(card[0] for card in cards) == sorted([*range(8), *range(8)])
    assert page.locator(".branch").count() == 14
    page.keyboard.press("ArrowRight")
    assert page.locator(".lines .arrow").count() == 8


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("per_host", [2, 4])
@pytest.mark.parametrize("name", ["all_reduce_ring", "all_reduce_hierarchical"])
def test_hosts_are_boxes_around_their_ranks(
    name: str, per_host: int, width: int, visit: Callable[..., Page]
) -> None:
    graph = networks.load("hosts")(8, per_host=per_host)
    image = picture(algorithms.load(name).schedule(8), hosts=graph.hosts())
    page = visit(html([image]), width=width)
    cards = {rank: box for rank, *box in page.evaluate(CARDS)}
    boxes = page.evaluate(
        "[...document.querySelectorAll('.host')].map(h => [h.textContent, "
        "...(({left, right, top, bottom}) => [left, right, top, bottom])"
        "(h.querySelector('rect').getBoundingClientRect())])"
    )
    assert [box[0] for box in boxes] == list(image.shape.names)
    for (_, left, right, top, bottom), mine in zip(boxes, image.shape.hosts, strict=True):
        for rank, box in cards.items():
            inside = left <= box[0] < box[1] <= right and top <= box[2] < box[3] <= bottom
            assert inside == (rank in mine)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "name", ["all_reduce_ring", "all_to_all_pairwise", "scan_hillis_steele", "all_reduce_tree"]
)
def test_arrows_are_seen_and_names_stay_inside(
    name: str, width: int, drawn: Callable[..., Picture], visit: Callable[..., Page]
) -> None:
    page = visit(html([drawn(name, 8)]), width=width)
    page.keyboard.press("ArrowRight")
    assert min(page.evaluate(ARROWS)) >= 24
    assert page.evaluate(SPILLED) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_tables_side_by_side_are_whole(
    drawn: Callable[..., Picture], visit: Callable[..., Page]
) -> None:
    page = visit(html([drawn("all_reduce_ring", 8), drawn("all_reduce_tree", 8)]), width=1400)
    page.keyboard.press("End")
    over = "[...document.querySelectorAll('.scroll')].map(s => s.scrollWidth - s.clientWidth)"
    assert page.evaluate(over) == [0, 0]


def test_sums_break_after_plus_only(
    drawn: Callable[..., Picture], visit: Callable[..., Page]
) -> None:
    page = visit(html([drawn("all_reduce_ring", 7)]), width=2400)
    page.keyboard.press("End")
    lines = page.evaluate(
        """() => [...document.querySelectorAll("td")].flatMap(cell => {
          const tops = [...cell.childNodes].filter(node => node.nodeType === 3).map(node => {
            const range = document.createRange();
            range.selectNodeContents(node);
            return range.getClientRects().length;
          });
          return tops;
        })"""
    )
    assert set(lines) == {1}  # no term lies on two lines


def test_the_page_tells_the_story(
    drawn: Callable[..., Picture], visit: Callable[..., Page]
) -> None:
    image = drawn("all_reduce_ring", 5)
    page = visit(html([image]))
    tops = set()
    for number, words in enumerate(image.story.words):
        assert page.locator(".words").inner_text() == words
        assert image.story.places[number] in page.locator(".told h3").inner_text()
        tops.add(page.evaluate("document.querySelector('.stage').getBoundingClientRect().top"))
        page.keyboard.press("ArrowRight")
    assert len(tops) == 1  # nothing jumps


def test_a_barrier_has_no_buffer(drawn: Callable[..., Picture], visit: Callable[..., Page]) -> None:
    page = visit(html([drawn("barrier_dissemination", 4)]))
    assert "Buffer" not in page.locator(".costs").inner_text()
    assert "MiB" not in page.locator("body").inner_text()
