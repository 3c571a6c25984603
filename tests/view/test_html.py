from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest

from roundelay.algorithms import algorithms
from roundelay.errors import InvalidArgumentError
from roundelay.networks import networks
from roundelay.schedule import Cell, Transfer
from roundelay.view import CellView, Picture
from roundelay.view.captions import printable
from roundelay.view.html import html

SIZES = (1, 2, 3, 5, 8)


class Page(HTMLParser):
    """The elements of a page: tags with their attributes, and the text in each kind of tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.texts.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        self.texts.append((f"after {tag}", ""))

    def handle_data(self, data: str) -> None:
        if self.texts:
            tag, text = self.texts[-1]
            self.texts[-1] = tag, text + data

    def all(self, tag: str) -> list[str]:
        return [text for found, text in self.texts if found == tag]

    def data(self) -> Any:
        (embedded,) = [text for text in self.all("script") if text.startswith("{")]
        return json.loads(embedded)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", algorithms.names())
def test_embedded_data_replays_to_the_picture(
    name: str, size: int, drawn: Callable[..., Picture]
) -> None:
    picture = drawn(name, size)
    (data,) = Page(html([picture])).data()["pictures"]

    cells: dict[Cell, CellView] = {}
    assert len(data["frames"]) == len(picture.frames)
    for frame, embedded in zip(picture.frames, data["frames"], strict=True):
        changed = set()
        for rank, chunk, value, done in embedded["cells"]:
            text, ranks = data["values"][value][:2]
            cells[Cell(rank, chunk)] = CellView(tuple(ranks), text, bool(done))
            changed.add(Cell(rank, chunk))
        assert cells == frame.cells
        assert changed == set(frame.changed if frame.number else frame.cells)

        step = frame.number - 1
        sent = embedded.get("messages", [])
        pairs = [(src, dst) for src, dst, _ in sent]
        assert len(set(pairs)) == len(pairs)
        assert Counter(frame.transfers) == Counter(
            Transfer(step, src, dst, chunk, op) for src, dst, parts in sent for chunk, op in parts
        )

    shown = {(rank, chunk) for rank, mine in enumerate(data["slots"]) for chunk in mine}
    assert cells.keys() <= shown
    assert data["failures"] == []


def test_policy_allows_exactly_what_is_written(drawn: Callable[..., Picture]) -> None:
    text = html([drawn("all_reduce_ring", 5)])
    page = Page(text)

    (policy,) = [
        attrs["content"]
        for tag, attrs in page.tags
        if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    (style,) = page.all("style")
    (script,) = [text for text in page.all("script") if "new Player" in text]
    assert policy is not None
    assert "default-src 'none'" in policy
    for content, source in ((style, "style-src"), (script, "script-src")):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{source} 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert not [attrs for _, attrs in page.tags if attrs.keys() & {"src", "href", "style"}]


def test_scripts_show_data_as_text_only() -> None:
    folder = resources.files("roundelay.view").joinpath("page")
    scripts = [file for file in folder.iterdir() if file.name.endswith(".js")]
    assert len(scripts) > 3
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, f"{script.name} has {word}"


def test_hostile_titles_stay_text(hostile: str, drawn: Callable[..., Picture]) -> None:
    tame = Page(html([drawn("broadcast_direct", 3)]))
    picture = drawn("broadcast_direct", 3, title=hostile, rank_name=hostile)
    text = html([picture])
    page = Page(text)

    text.encode("utf-8")
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in tame.tags]
    assert page.all("h1")[0].strip() == printable(hostile).strip()
    assert page.data()["pictures"][0]["title"] == printable(hostile)
    assert page.data()["pictures"][0]["ranks"] == [printable(f"{hostile}{n}") for n in range(3)]


def test_costs_are_those_of_the_price(drawn: Callable[..., Picture]) -> None:
    picture = drawn("all_reduce_ring", 4, network=networks.load("switch")(4))
    (data,) = Page(html([picture])).data()["pictures"]
    costs = dict(data["costs"])
    assert costs["Steps"] == "6"
    assert costs["Messages"] == "24"
    assert costs["Sent per rank, at most"] == "1.5 MiB"
    assert costs["Busiest link"].endswith("1.5\u00a0MiB")
    assert costs["Estimated time"].endswith(" on switch")
    for frame in data["frames"][1:]:
        assert frame["cost"].startswith("4 messages · 1 MiB · ")


@pytest.mark.parametrize("name", algorithms.names())
def test_unpriced_pictures_count_messages(name: str, drawn: Callable[..., Picture]) -> None:
    priced = drawn(name, 5)
    assert priced.price is not None
    costs = dict(Page(html([priced])).data()["pictures"][0]["costs"])
    assert costs["Messages"] == str(priced.price.messages)
    assert costs["Steps"] == str(len(priced.price.steps))


def test_failures_belong_to_their_frames(broken: Picture) -> None:
    (data,) = Page(html([broken])).data()["pictures"]
    last = len(broken.frames) - 1
    expected = Counter(
        (last if failure.step is None else failure.step + 1, failure.rank, failure.chunk)
        for failure in broken.failures
    )
    assert expected
    assert expected == Counter(tuple(found[:3]) for found in data["failures"])
    for failure in broken.failures:
        assert any(failure.detail in found[3] for found in data["failures"])


def test_large_schedules_stay_small_files(drawn: Callable[..., Picture]) -> None:
    assert len(html([drawn("all_reduce_ring", 64)])) < 3_000_000


@pytest.mark.parametrize("count", [0, 3])
def test_draws_one_or_two(count: int, drawn: Callable[..., Picture]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"not {count}"):
        html([drawn("broadcast_direct", 2)] * count)
