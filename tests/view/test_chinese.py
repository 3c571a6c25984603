"""What pictures and plans say in Chinese is Chinese, and says what the English does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree as ET

import pytest

from roundelay.contraction import cut_along, shortest_lengths
from roundelay.language import LANGUAGES, Language
from roundelay.networks import cluster_called
from roundelay.pipelines import pipeline_for, pipelines
from roundelay.planning import advice, asked_choices, asked_task, plan, reason, transformer, why
from roundelay.planning.why_chinese import in_chinese
from roundelay.view.attention import ring_picture, ulysses_picture
from roundelay.view.attention_svg import attention_svg
from roundelay.view.cube import CubeRun, ProductRun, cube_picture
from roundelay.view.cube_svg import cube_svg
from roundelay.view.pipeline_picture import pipeline_picture
from roundelay.view.pipeline_svg import pipeline_svg

#: What engineers write in Latin letters: names of the field, of tensors, and of calls.
LATIN = re.compile(
    r"rank|all-reduce|all-gather|reduce-scatter|all-to-all|GPU|[KMGT]i?B|token|logit|query|key|mfu"
    r"|max|Ulysses|rd|Zero|offload|optimizer|zero\d|ddp|ps(-async)?|[dtcps]p|threads|zb-h1|gpipe"
    r"|(interleaved-)?1f1b|[a-zA-Z]\d*|\dLsht|d[XYW]|b\d*s\d*|[0-9.e+-]+"
)
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")
DRAWING = "{http://www.w3.org/2000/svg}"


def english(text: str) -> list[str]:
    """Return the words that were left in English."""
    return [word for word in WORD.findall(text) if not LATIN.fullmatch(word)]


def test_english_is_found() -> None:
    assert english("每个 rank 发送 waits half，dp=64") == ["waits", "half"]


def numbers(text: str) -> list[str]:
    return sorted(re.findall(r"\d+(?:\.\d+)?", text))


def texts(svg: str) -> Iterator[str]:
    for element in ET.fromstring(svg).iter():
        if element.tag in (f"{DRAWING}text", f"{DRAWING}title"):
            yield "".join(element.itertext())


def cube(language: Language, dims: list[str], ranks: list[int]) -> str:
    made = cut_along(dims, ranks, shortest_lengths(dims, ranks))
    names = ("X", "W", "Y", "dX", "dW", "dY")
    ran = CubeRun(
        [{name: made.shape(rank, name) for name in names} for rank in range(made.size)],
        [dict.fromkeys(names, 64) for _ in range(made.size)],
        {name: ProductRun([8] * made.size, 0.0, ["1", "2"]) for name in ("Y", "dX", "dW")},
    )
    return cube_svg(cube_picture(made, ran, language))


def drawings(language: Language) -> dict[str, str]:
    found = {}
    for layout in ("contiguous", "zigzag"):
        for causal in (True, False):
            for picture in (ring_picture, ulysses_picture):
                drawn = picture(4, layout, causal=causal, language=language)
                found[f"{picture.__name__} {layout} {causal}"] = attention_svg([drawn])
    for maker in pipelines:
        schedule = pipeline_for(maker.word)
        found[maker.word] = pipeline_svg(pipeline_picture(schedule, language=language))
    for dims, ranks in ((["batch"], [2]), (["rows"], [4]), (["batch", "columns"], [2, 3]),
                        (["none"], [2]), (["sequence", "rows"], [2, 8])):  # fmt: skip
        found[f"{dims} {ranks}"] = cube(language, dims, ranks)
    return found


def test_drawings_are_told_in_chinese() -> None:
    """The same drawing: as many shapes, the same numbers in the same number of texts."""
    both = {language: drawings(language) for language in LANGUAGES}
    for name, chinese in both["zh"].items():
        plain = both["en"][name]
        assert [left for text in texts(chinese) for left in english(text)] == [], name
        assert re.search(r"[\u4e00-\u9fff]", chinese), name
        assert not re.search(r"[\u4e00-\u9fff]", plain), name
        for tag in ("rect", "path", "circle"):
            assert chinese.count(f"<{tag}") == plain.count(f"<{tag}"), name


@pytest.mark.parametrize("gpus", [1, 64, 4096])
@pytest.mark.parametrize("params", [125_000_000, 70_000_000_000])
@pytest.mark.parametrize("strategy", [(), ("ps",), ("zero1",), ("zero2",), ("ddp",)])
def test_plans_are_told_in_chinese(params: int, gpus: int, strategy: tuple[str, ...]) -> None:
    cluster = cluster_called("h100-ib")
    task = asked_task(transformer(params=params), cluster, gpus=gpus, sequence=8192)
    wanted = asked_choices(cluster, strategies=strategy)
    found = plan(task, wanted)
    chinese, plain = reason(found, "zh"), reason(found)
    if found.best is None:
        chinese, plain = advice(found, wanted, "zh"), advice(found, wanted)
    assert english(chinese) == []
    assert numbers(chinese) == numbers(plain)
    for term in why(task, found.best or found.nearest):
        told = in_chinese(term)
        assert english(told.what) == english(told.formula) == []
        assert (told.numbers, told.value) == (term.numbers, term.value)
