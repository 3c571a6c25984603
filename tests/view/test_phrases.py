"""What pictures say, in every language: nothing is missing, and nothing is left in English."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from string import Formatter

import pytest

from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.errors import ScheduleError
from roundelay.networks import networks
from roundelay.schedule import Schedule
from roundelay.view import Picture, picture
from roundelay.view.html import html, picture_data, titles_of
from roundelay.view.phrases import GRAMMAR, PHRASES, PROMISES
from roundelay.view.picture import title_of
from roundelay.view.story import promise_of

#: Words that engineers write in Latin letters, whatever they speak.
FIELD = re.compile(
    r"GPU|ranks?|host|network|switch|hosts|[KMG]?iB|[µmn]?s|S|"
    r"all-(reduce|gather|to-all)|reduce-scatter|reduce|scatter|gather|broadcast|barrier|"
    r"exclusive|scan|[a-z]{1,2}|r-",
    re.IGNORECASE,
)
LATIN = re.compile(r"[A-Za-z][A-Za-z-]*")


def gaps(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}


@pytest.mark.parametrize("key", PHRASES["en"])
def test_languages_have_the_same_gaps(key: str) -> None:
    english, chinese = PHRASES["en"][key], PHRASES["zh"][key]
    assert gaps(english) - GRAMMAR == gaps(chinese)


def english_in(text: str) -> list[str]:
    return [word for word in LATIN.findall(text) if not FIELD.fullmatch(word)]


def texts(data: dict[str, object]) -> Iterator[str]:
    """Yield every text of a picture that Python has written."""
    for key in ("about", "places", "words", "costs", "failures"):
        stack = [data[key]]
        while stack:
            value = stack.pop()
            if isinstance(value, str):
                yield value
            elif isinstance(value, (list, tuple)):
                stack += value


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("name", algorithms.names())
def test_chinese_stories_are_chinese(name: str, size: int, drawn: Callable[..., Picture]) -> None:
    for network in (None, networks.load("hosts")(size)):
        hosts = network.hosts() if network else {}
        story = drawn(name, size, network=network, hosts=hosts, language="zh")
        data = picture_data(story, story.title)
        assert {text: left for text in texts(data) if (left := english_in(text))} == {}
        ends = {sentence[-1] for sentence in data["words"]}
        assert ends == {"。"}


def broken(name: str, size: int) -> Iterator[Picture]:
    """Yield pictures of an algorithm in which one transfer is missing, doubled or of another op."""
    whole = algorithms.load(name).schedule(size)
    for at, transfer in enumerate(whole.transfers):
        other = transfer._replace(op="copy" if transfer.op == "reduce" else "reduce")
        for instead in ([], [other], [transfer, other], [transfer, transfer]):
            transfers = [*whole.transfers[:at], *instead, *whole.transfers[at + 1 :]]
            try:
                made = Schedule(whole.collective, size, transfers, root=0, parts=whole.parts)
            except ScheduleError:  # a step without any transfer
                continue
            yield picture(made, language="zh")


@pytest.mark.parametrize("name", algorithms.names())
def test_what_breaks_is_told_in_chinese(name: str) -> None:
    found = [text for each in broken(name, 3) for text in texts(picture_data(each, ""))]
    assert found
    assert {text for text in found if english_in(text)} == set()


@pytest.mark.parametrize("name", collectives.names())
def test_every_promise_is_there(name: str) -> None:
    collective = collectives.load(name)
    assert promise_of(collective, "zh") == PROMISES[name]
    assert english_in(promise_of(collective, "zh")) == []


def test_titles_share_what_is_alike() -> None:
    ring, tree = (
        title_of(algorithms.load(f"all_reduce_{name}").schedule(4), "zh")
        for name in ("ring", "tree")
    )
    title, titles = titles_of([ring, tree], "zh")
    assert (title, titles) == (
        "all_reduce_ring 与 all_reduce_tree · 4 个 rank",
        ["all_reduce_ring", "all_reduce_tree"],
    )


def test_a_page_says_its_language(drawn: Callable[..., Picture]) -> None:
    assert '<html lang="zh">' in html([drawn("broadcast_direct", 3, language="zh")])
    assert '<html lang="en">' in html([drawn("broadcast_direct", 3)])
