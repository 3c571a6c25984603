"""Which questions of the page a static site has answers to: said in the page, and computed here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from roundelay.algorithms import algorithms_of
from roundelay.collectives import collectives
from roundelay.errors import RoundelayError
from roundelay.networks import cluster_names
from roundelay.pipelines import pipelines
from roundelay.view.languages import LANGUAGES
from roundelay.view.training_step import STRATEGY_NAMES
from roundelay.view.training_step.choices import SHOWN_PRECISIONS
from roundelay.web import Document, Query
from roundelay.web.views import views

Params = dict[str, str]
Name = TypeVar("Name", bound=str)

SIZES = (2, 3, 4, 5, 8)
FEW_SIZES = (5,)
MANTISSAS = (1, 1.3, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 7.5, 8, 9)  # those of the page's slider
FOUR, LONGER = "1,1 2,2 3,3 4,4", "1,1,1,1 2,2,2,2 3,3,3,3 4,4,4,4"
#: The pictures of the tour that are not a collective by itself.
TOUR: tuple[Params, ...] = (
    {"collective": "broadcast", "algorithm": "binomial", "values": "1,1", "ranks": "4"},
    {"collective": "broadcast", "algorithm": "direct", "values": "1,1", "ranks": "4"},
    {"collective": "scatter", "algorithm": "direct", "values": "1,2,3,4", "ranks": "4"},
    {"collective": "gather", "algorithm": "direct", "values": "1 2 3 4"},
    {"collective": "reduce", "algorithm": "direct", "values": FOUR},
    {"collective": "all_gather", "algorithm": "direct", "values": FOUR},
    {"collective": "reduce_scatter", "algorithm": "direct", "values": LONGER},
    {"collective": "all_reduce", "algorithm": "two_shot", "values": LONGER},
    {"collective": "all_to_all", "algorithm": "direct",
     "values": "1,2,3,4 5,6,7,8 9,10,11,12 13,14,15,16"},
)  # fmt: skip
#: What the page says of it, in its languages.
SAID = {
    "en": "This is a copy without a server. The tour is whole; of the other views it has: every "
    "algorithm on {sizes} ranks on the network “switch”; cubes with one cut; pipelines, attention, "
    "meshes and training steps of a few sizes; plans in which one slider is moved. For everything "
    "else, run `roundelay web`.",
    "zh": "这是没有服务器的副本。导览是完整的；其他视图包含：{sizes} 个 rank 上的每种算法"
    "（网络为 switch）；只切一刀的立方体；几种大小的流水线、注意力、网格和训练步；"
    "只动一个滑块的规划。其余的请运行 `roundelay web`。",
}


class Recorded(Query):
    """A query that remembers what it would have taken where nothing was given."""

    def __init__(self, params: Params) -> None:
        super().__init__(params.items())
        self.usual: Params = {}

    def whole(self, name: str, default: int, *, low: int, high: int) -> int:
        """Return a whole number."""
        self.usual[name] = str(default)
        return super().whole(name, default, low=low, high=high)

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        """Return a number."""
        self.usual[name] = repr(default)
        return super().number(name, default, low=low, high=high)

    def choice(self, name: str, known: Iterable[Name], default: Name | None = None) -> Name:
        """Return one of some names."""
        names = list(known)
        self.usual[name] = names[0] if default is None else default
        return super().choice(name, names, default)

    def text(self, name: str, default: str = "", *, most: int = 200) -> str:
        """Return a text."""
        self.usual[name] = default
        return super().text(name, default, most=most)


@dataclass(frozen=True)
class Answered:
    """A question, what it was asked with, what is usual, and the answer."""

    question: str  # view/question
    given: Params
    usual: Params
    document: Document


def said(language: str, *, few: bool) -> str:
    """Return what the page says of what it has."""
    return SAID[language].format(sizes=", ".join(map(str, FEW_SIZES if few else SIZES)))


def states(*, few: bool) -> Iterator[tuple[str, Params]]:
    """Yield every question with its parameters, in one language."""
    for view in views:
        yield from ((f"{view.name}/{question}", {}) for question in view.answers)
    names = ["all_reduce"] if few else collectives.names()
    yield from _collectives(names, FEW_SIZES if few else SIZES)
    for params in TOUR:
        yield "collectives/pictures", dict(params)
    for power in (20,) if few else range(6, 31, 2):
        yield "collectives/prices", {"collective": "all_reduce", "ranks": "8",
                                     "bytes": str(1 << power), "network": "switch"}  # fmt: skip
    for power in (6, 3) if few else range(11):
        yield "tour/zero", {"ranks": str(1 << power)}
    yield from _axes(few=few)
    if not few:
        yield from _each("training/step", strategy=STRATEGY_NAMES, precision=SHOWN_PRECISIONS,
                         ranks=("2", "3", "4", "8"))  # fmt: skip
    yield from _planner(few=few)


def _collectives(names: Iterable[str], sizes: Iterable[int]) -> Iterator[tuple[str, Params]]:
    for collective in map(collectives.load, names):
        yield "collectives/crossover", {"collective": collective.name}
        for size in sizes:
            yield "collectives/prices", {"collective": collective.name, "ranks": str(size)}
            for algorithm in algorithms_of(collective):
                yield "collectives/pictures", {"collective": collective.name, "ranks": str(size),
                                               "algorithm": algorithm.short_name}  # fmt: skip


def _axes(*, few: bool) -> Iterator[tuple[str, Params]]:
    sizes = ("4",) if few else ("2", "4", "8")
    splits = ("batch", "sequence", "rows", "columns", "none")
    yield from _each("axes/cube", split=splits, ranks=("2",) if few else ("1", "2", "3", "4"))
    yield from _each("axes/pipeline", schedule=[maker.word for maker in pipelines], ranks=sizes,
                     micro_batches=("8",) if few else ("4", "8", "16"))  # fmt: skip
    yield from _each("axes/attention", method=("ring", "ulysses"), ranks=sizes,
                     layout=("contiguous", "zigzag"), mask=("causal", "full"))  # fmt: skip
    yield from _each("axes/mesh", along=("dp", "tp", "cp", "pp"), cp=("1",) if few else ("1", "2"))


def _each(question: str, **values: Iterable[str]) -> Iterator[tuple[str, Params]]:
    """Yield a question with every combination of values."""
    for chosen in product(*values.values()):
        yield question, dict(zip(values, chosen, strict=True))


def _planner(*, few: bool) -> Iterator[tuple[str, Params]]:
    moved = [{"gpus": str(1 << power)} for power in ((6, 3) if few else range(18))]
    if not few:
        moved += [{"params": f"{mantissa * 10**power:.0f}"} for power in (9, 10, 11)
                  for mantissa in MANTISSAS]  # fmt: skip
        moved += [{"network": name} for name in cluster_names()]
    for params in moved:
        yield "planner/plan", params
        yield "planner/scaling", params


def answered(task: tuple[str, Params]) -> Answered | None:
    """Answer one question; nothing where it can't be asked, as of a size that does not go."""
    question, given = task
    view, _, name = question.partition("/")
    query = Recorded(given)
    try:
        document = views.load(view).answers[name](query)
        query.finish()
    except RoundelayError:
        return None
    return Answered(question, given, query.usual, document)


def answers(*, few: bool) -> Iterator[Answered]:
    """Yield all answers, in every language; those that are asked twice come once."""
    tasks = {}
    for question, params in states(few=few):
        for language in LANGUAGES:
            given = {**params, "lang": language}
            tasks[question, *sorted(given.items())] = (question, given)
    if few:
        yield from filter(None, map(answered, tasks.values()))
        return
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        yield from filter(None, pool.map(answered, tasks.values(), chunksize=8))
