"""A training step as data: its bytes are the planner's, its words in two languages."""

from __future__ import annotations

import re
import string
from dataclasses import replace
from itertools import product

import pytest

from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.networks import cluster_names
from roundelay.planning import fullest_rank, step_time
from roundelay.planning.clock import staleness_bound
from roundelay.view.languages import LANGUAGES
from roundelay.view.training_step import (
    STRATEGY_NAMES,
    StepChoices,
    TrainingStep,
    step_document,
    training_step,
)
from roundelay.view.training_step.lanes import chosen
from roundelay.view.training_step.phrases import NAMES, PHRASES
from roundelay.view.training_step.words import strategy_names

COLLECTIVE = tuple(name for name in STRATEGY_NAMES if not name.startswith("ps"))
SIZES = (1, 2, 3, 4, 8)
PRECISIONS = ("fp32", "bf16")
GRID = [StepChoices(strategy, ranks=ranks, layers=layers, buckets=buckets, precision=precision)
        for strategy, ranks, precision, (layers, buckets) in product(
            STRATEGY_NAMES, SIZES, PRECISIONS, ((2, 1), (4, 2), (5, 3)))]  # fmt: skip
CHINESE = re.compile("[\u4e00-\u9fff]")


def named(choices: StepChoices) -> str:
    late = "" if choices.straggler is None else f"-late{choices.straggler}"
    return f"{choices.strategy}-{choices.ranks}-{choices.precision}-{choices.layers}{late}"


def parts(step: TrainingStep, rank: int = 0) -> tuple[int, ...]:
    held = step.frames[-1].held[rank]
    return held.parameters, held.gradients, held.optimizer, held.transient


@pytest.mark.parametrize("choices", GRID, ids=named)
def test_memory_is_the_planner_s(choices: StepChoices) -> None:
    step = training_step(choices)
    planned = fullest_rank(step.sizes.task, step.sizes.candidate)
    held = planned.held
    assert parts(step) == (held.parameters, held.gradients, held.optimizer, held.transient)
    most = max(frame.held[0].transient for frame in step.frames)
    assert most == planned.transient  # of ZeRO-3, with the layers that are whole at a time
    assert all(frame.held[0].gradients <= held.gradients for frame in step.frames)


@pytest.mark.parametrize("choices", GRID, ids=named)
def test_bytes_sent_are_the_planner_s_and_the_price_of_the_schedules(choices: StepChoices) -> None:
    step = training_step(choices)
    sent = step.frames[-1].sent
    rounds = 2 if choices.strategy in ("ps-async", "ps-ssp") else 1
    planned = step_time(step.sizes.task, step.sizes.candidate).sent
    padding = 12 * choices.ranks * choices.layers * 4
    assert max(sent) == pytest.approx(rounds * planned, abs=padding)
    if choices.served:
        return
    item = step.sizes.width.gradient
    for rank in range(choices.ranks):
        priced = sum(
            chosen(one.kind, choices.ranks, one.nbytes, item)[1].sent[rank]
            for one in step.movements
        )
        assert sent[rank] == priced


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_strategies_send_beside_ddp(ranks: int, precision: str) -> None:
    found = {
        name: training_step(StepChoices(name, ranks=ranks, precision=precision)).frames[-1].sent
        for name in COLLECTIVE
    }
    assert found["zero1"] == found["zero2"] == found["ddp"]
    assert [2 * one for one in found["zero3"]] == [3 * one for one in found["ddp"]]
    half = training_step(StepChoices(ranks=ranks, precision="bf16")).frames[-1].sent
    whole = training_step(StepChoices(ranks=ranks, precision="fp32")).frames[-1].sent
    assert [2 * one for one in half] == list(whole)


@pytest.mark.parametrize("cluster", cluster_names())
@pytest.mark.parametrize("strategy", COLLECTIVE)
def test_seconds_are_the_planner_s_where_nobody_is_slow(strategy: str, cluster: str) -> None:
    for ranks, layers in product((1, 2, 4, 8), (2, 4, 8)):
        choices = StepChoices(strategy, ranks=ranks, layers=layers, cluster=cluster,
                              precision="fp32")  # fmt: skip
        step = training_step(choices)
        assert step.seconds == pytest.approx(step.sizes.seconds.total, rel=0.05)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_nobody_waits_less_than_the_straggler(strategy: str) -> None:
    for ranks in (2, 3, 4):
        plain = training_step(StepChoices(strategy, ranks=ranks))
        for late in range(ranks):
            step = training_step(StepChoices(strategy, ranks=ranks, straggler=late))
            assert step.seconds > plain.seconds or strategy == "ps-ssp"
            if strategy not in ("ps-async", "ps-ssp"):
                assert min(range(ranks), key=lambda rank: step.waited[rank]) == late
                named_late = {span.waits_for for span in step.spans if span.kind == "wait"}
                assert named_late <= {-1, late}
                assert late in named_late


@pytest.mark.parametrize("choices", GRID, ids=named)
def test_cells_say_who_owns_what(choices: StepChoices) -> None:
    step = training_step(choices)
    last = step.frames[-1].cells
    owners = {"zero1": "o", "zero2": "go", "zero3": "pgo"}.get(choices.strategy, "")
    for letter, part in (("p", "parameters"), ("g", "gradients"), ("o", "optimizer")):
        for unit in range(choices.layers):
            cells = [mine[part][unit] for mine in last]
            if letter in owners and choices.ranks > 1:
                for rank, cell in enumerate(cells):
                    held = [at for at, digit in enumerate(cell) if digit != "0"]
                    assert held == [rank]
            elif not (part == "optimizer" and choices.strategy in ("ps-async", "ps-ssp")):
                assert all("0" not in cell for cell in cells)
    assert {digit for mine in last for cell in mine["parameters"] for digit in cell} <= set("03")


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("late", [None, 0, 1])
def test_gradients_are_no_staler_than_the_bound(staleness: int, late: int | None) -> None:
    for ranks in (2, 3, 5):
        choices = StepChoices("ps-ssp", ranks=ranks, straggler=late, staleness=staleness)
        step = training_step(choices)
        pushes = [one for one in step.movements if one.kind == "push"]
        assert max(one.stale for one in pushes) <= staleness_bound(ranks, staleness)
        assert sum(one.kind == "pull" for one in step.movements) == len(pushes)
        assert [one.number for one in pushes] == [*range(1, len(pushes) + 1)]


@pytest.mark.parametrize(
    "choices",
    [
        one
        for each in GRID
        if each.layers == 4 and each.ranks in (1, 3)
        for one in (each, replace(each, straggler=each.ranks - 1))
    ],
    ids=named,
)
def test_every_moment_is_told_in_both_languages(choices: StepChoices) -> None:
    for language in LANGUAGES:
        document = step_document(choices, language)
        assert document["name"] == strategy_names(language)[choices.strategy]
        for frame in document["frames"]:  # type: ignore[attr-defined]
            for text in (frame["title"], frame["words"]):
                assert text
                assert not set("{}") & set(text)
                assert bool(CHINESE.search(text)) == (language == "zh")


def test_phrases_have_the_same_places_in_both_languages() -> None:
    def places(text: str) -> set[str]:
        return {name.lower() for _, name, _, _ in string.Formatter().parse(text) if name}

    for key, (english, chinese) in PHRASES.items():
        assert places(english) == places(chinese), key
        assert english[:1].isascii()
        assert CHINESE.search(chinese) or not re.search("[a-z] [a-z]", chinese), key
    assert set(NAMES) == set(STRATEGY_NAMES)


def test_time_goes_on_and_what_is_sent_grows() -> None:
    for choices in GRID:
        step = training_step(choices)
        times = [frame.at for frame in step.frames]
        assert times == sorted(times)
        assert step.frames[0].sent == [0] * choices.ranks
        for one, other in zip(step.frames, step.frames[1:], strict=False):
            assert all(a <= b for a, b in zip(one.sent, other.sent, strict=True))


def test_what_can_not_be_shown_is_refused() -> None:
    for wrong in ({"strategy": "ddp2"}, {"precision": "fp8"}, {"cluster": "nowhere"}):
        with pytest.raises(UnknownNameError):
            training_step(StepChoices(**wrong))  # type: ignore[arg-type]
    for number in ({"ranks": 0}, {"ranks": 9}, {"layers": 0}, {"layers": 99}, {"buckets": 0},
                   {"straggler": 4}, {"straggler": -1}, {"staleness": 9}):  # fmt: skip
        with pytest.raises(InvalidArgumentError):
            StepChoices(**number)  # type: ignore[arg-type]
