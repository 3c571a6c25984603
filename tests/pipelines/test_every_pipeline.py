"""Every pipeline schedule is proved on every grid; what is changed in it is found, by name."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from roundelay.errors import InvalidArgumentError, ProofError, ScheduleError, UnknownNameError
from roundelay.pipelines import (
    PipelineAction,
    PipelineFailure,
    PipelineSchedule,
    StageCosts,
    find_pipeline_failures,
    load_pipeline,
    pipeline_called,
    pipeline_from_json,
    pipeline_to_json,
    pipelines,
    price_pipeline,
    prove_pipeline,
    save_pipeline,
)

WORDS = [maker.word for maker in pipelines]
COSTS = [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5), (2.0, 1.0, 1.0), (3.0, 7.0, 2.0)]


def grid(word: str) -> Iterator[tuple[int, int, int]]:
    """Ranks, micro-batches and stages per rank that a schedule takes."""
    maker = pipeline_called(word)
    for size in range(1, 9):
        for micro_batches in [*range(1, 13), 16, 24]:
            if not maker.multiple or micro_batches % size == 0:
                for each in (1, 2, 3, 4) if maker.interleaves else (1,):
                    yield size, micro_batches, each


def test_the_known_ones() -> None:
    assert sorted(WORDS) == ["1f1b", "gpipe", "interleaved-1f1b", "zb-h1"]
    for name, maker in zip(pipelines.names(), pipelines, strict=True):
        assert pipeline_called(name) is pipeline_called(maker.word.upper()) is maker
        assert maker.summary.endswith(".")
    with pytest.raises(UnknownNameError, match="Did you mean '1f1b'"):
        pipeline_called("1f2b")
    with pytest.raises(UnknownNameError):
        pipeline_called(None)


@pytest.mark.parametrize("word", WORDS)
def test_is_proved_and_counted(word: str) -> None:
    maker = pipeline_called(word)
    for size, micro_batches, each in grid(word):
        schedule = maker(size, micro_batches, stages_per_rank=each)
        proof = prove_pipeline(schedule)
        boundaries = size * each - 1 if size > 1 else 0
        assert proof.messages == 2 * boundaries * micro_batches
        for rank, peak in enumerate(proof.peaks):
            most = {
                "gpipe": micro_batches,
                "1f1b": min(size - rank, micro_batches),
                "zb-h1": min(size, micro_batches),
                "interleaved-1f1b": min(
                    2 * (size - 1 - rank) + (each - 1) * size + 1, each * micro_batches
                ),
            }[word]
            assert peak == most, (size, micro_batches, each, rank)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("word", WORDS)
def test_the_timeline_has_the_bubble_of_the_formula(
    word: str, costs: tuple[float, float, float]
) -> None:
    maker = pipeline_called(word)
    forward, inputs, weights = costs
    for size, micro_batches, each in grid(word):
        if word == "zb-h1" and (micro_batches < size or weights > min(forward, inputs)):
            continue  # where the formula does not hold
        schedule = maker(size, micro_batches, stages_per_rank=each)
        priced = price_pipeline(schedule, StageCosts(*costs))
        formula = maker.bubble(size, micro_batches, stages_per_rank=each, costs=costs)
        assert priced.bubble == pytest.approx(formula, abs=1e-12)
        work = micro_batches * each * sum(costs)
        assert priced.busy == pytest.approx([work] * size)
        assert priced.makespan == pytest.approx(work + maker.idle(size, *costs))


def test_formulas_as_they_are_written() -> None:
    for size, micro_batches in [(2, 4), (4, 8), (8, 8)]:
        plain = (size - 1) / (micro_batches + size - 1)
        assert pipeline_called("gpipe").bubble(size, micro_batches) == pytest.approx(plain)
        assert pipeline_called("1f1b").bubble(size, micro_batches) == pytest.approx(plain)
        thrice = pipeline_called("interleaved-1f1b").bubble(size, micro_batches, stages_per_rank=3)
        assert thrice == pytest.approx((size - 1) / (3 * micro_batches + size - 1))
        halves = pipeline_called("zb-h1").bubble(size, micro_batches)
        assert halves == pytest.approx((size - 1) / (3 * micro_batches + size - 1))


def test_costs_of_each_stage_and_transfers() -> None:
    schedule = pipeline_called("1f1b")(2, 1)
    costs = [StageCosts(1, 1, 1), StageCosts(2, 3, 4)]
    assert price_pipeline(schedule, costs).makespan == 1 + 2 + 7 + 2
    priced = price_pipeline(schedule, costs, transfer=10)
    assert priced.makespan == 1 + 10 + 2 + 7 + 10 + 2
    assert [span.start for span in priced.spans[0]] == [0, 30]
    for slow in (1.0, 5.0):  # messages in the background hold up nobody but who waits for them
        alone = price_pipeline(pipeline_called("1f1b")(1, 6), transfer=slow)
        assert alone.bubble == 0
    with pytest.raises(InvalidArgumentError, match="costs of 1 stages"):
        price_pipeline(schedule, costs[:1])
    for wrong in (-1.0, float("nan"), float("inf"), "2"):
        with pytest.raises(InvalidArgumentError, match="from 0"):
            StageCosts(forward=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="from 0"):
            price_pipeline(schedule, transfer=wrong)  # type: ignore[arg-type]


# ---- what is wrong is found


def changed(
    schedule: PipelineSchedule, rank: int, actions: list[PipelineAction]
) -> list[PipelineFailure]:
    ranks: list[list[PipelineAction]] = [list(each) for each in schedule.ranks]
    ranks[rank] = actions
    mutant = PipelineSchedule(ranks, schedule.micro_batches, placement=schedule.placement)
    failures = find_pipeline_failures(mutant)
    if failures:
        with pytest.raises(ProofError) as caught:
            prove_pipeline(mutant)
        assert str(failures[0]) in str(caught.value)
    return failures


@pytest.mark.parametrize(("size", "micro_batches"), [(1, 2), (2, 4), (4, 8), (3, 3)])
@pytest.mark.parametrize("word", WORDS)
def test_what_is_dropped_or_doubled_is_named(word: str, size: int, micro_batches: int) -> None:
    schedule = pipeline_called(word)(size, micro_batches)
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            before, after = list(actions[:index]), list(actions[index + 1 :])
            (lost,) = changed(schedule, rank, before + after)
            assert (lost.kind, lost.rank, lost.action) == ("missing", rank, action)
            (twice,) = changed(schedule, rank, [*before, action, action, *after])
            assert (twice.kind, twice.rank, twice.action) == ("doubled", rank, action)


@pytest.mark.parametrize(("size", "micro_batches"), [(1, 2), (2, 4), (4, 8), (3, 3)])
@pytest.mark.parametrize("word", WORDS)
def test_what_is_swapped_is_named_or_harmless(word: str, size: int, micro_batches: int) -> None:
    """A swap is refused by naming one of the two, or everything is still done in its order."""
    schedule = pipeline_called(word)(size, micro_batches)
    generator = random.Random(f"{word} {size}")
    refused = 0
    for rank, actions in enumerate(schedule.ranks):
        for first in range(len(actions)):
            second = generator.randrange(len(actions))
            swapped = list(actions)
            swapped[first], swapped[second] = actions[second], actions[first]
            failures = changed(schedule, rank, swapped)
            refused += bool(failures)
            for failure in failures:
                assert failure.kind in ("too early", "deadlock")
            early = [failure for failure in failures if failure.kind == "too early"]
            pair = {actions[first], actions[second]}
            assert all(failure.rank == rank for failure in early)
            assert not failures or early or rank in {failure.rank for failure in failures}
            if early:
                needs = {need for failure in early for need in schedule.needs(failure.action)}
                assert pair & ({failure.action for failure in early} | needs)
    assert refused


@pytest.mark.parametrize("word", WORDS)
def test_on_the_wrong_rank(word: str) -> None:
    schedule = pipeline_called(word)(4, 4)
    actions = list(schedule.ranks[1])
    stranger = schedule.ranks[2][0]
    failures = changed(schedule, 1, [*actions, stranger])
    assert (failures[0].kind, failures[0].rank, failures[0].action) == ("misplaced", 1, stranger)
    assert "is on rank 2" in failures[0].detail


def test_a_circle_is_told_with_all_who_wait_in_it() -> None:
    def act(kind: str, stage: int) -> PipelineAction:
        return PipelineAction(kind, stage, 0)  # type: ignore[arg-type]

    # Stages 0 and 2 on rank 0, and each rank wants to hear of the other first.
    first = [act("forward", 0), act("forward", 2), act("backward", 2), act("backward", 0)]
    second = [act("forward", 1), act("backward", 3), act("forward", 3), act("backward", 1)]
    failures = find_pipeline_failures(PipelineSchedule([first, second], 1, placement=[0, 1, 0, 1]))
    assert [failure.kind for failure in failures] == ["too early"]
    assert failures[0].action == act("backward", 3)
    crossed = PipelineSchedule(
        [
            [PipelineAction("forward", 0, 0), PipelineAction("backward", 0, 0),
             PipelineAction("forward", 0, 1), PipelineAction("backward", 0, 1)],
            [PipelineAction("forward", 1, 0), PipelineAction("forward", 1, 1),
             PipelineAction("backward", 1, 0), PipelineAction("backward", 1, 1)],
        ],
        2,
    )  # fmt: skip
    failures = find_pipeline_failures(crossed)
    assert [(failure.kind, failure.rank) for failure in failures] == [
        ("deadlock", 0), ("deadlock", 1)]  # fmt: skip
    assert "of rank 1, which itself waits for the forward of micro-batch 1" in failures[0].detail


def test_both_ways_backward_is_refused() -> None:
    actions = [PipelineAction(kind, 0, 0) for kind in
               ("forward", "input_grad", "weight_grad", "backward")]  # fmt: skip
    failures = find_pipeline_failures(PipelineSchedule([actions], 1))
    assert [(failure.kind, failure.action.kind) for failure in failures] == [
        ("doubled", "backward")]  # fmt: skip
    early = find_pipeline_failures(PipelineSchedule([[actions[0], actions[2], actions[1]]], 1))
    assert [(failure.kind, failure.action.kind) for failure in early] == [
        ("too early", "weight_grad")]  # fmt: skip


# ---- what can't be


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None, "4", 2000])
def test_sizes_that_can_not_be(wrong: object) -> None:
    maker = pipeline_called("1f1b")
    with pytest.raises(InvalidArgumentError, match="ranks of a pipeline"):
        maker(wrong, 4)  # type: ignore[arg-type]
    if wrong != 2000:
        with pytest.raises(InvalidArgumentError, match="micro_batches"):
            maker(4, wrong)  # type: ignore[arg-type]


def test_what_a_schedule_does_not_take() -> None:
    with pytest.raises(InvalidArgumentError, match="micro_batches=8"):
        pipeline_called("interleaved")(4, 6)
    with pytest.raises(InvalidArgumentError, match="one stage on every rank"):
        pipeline_called("1f1b")(4, 8, stages_per_rank=2)
    with pytest.raises(InvalidArgumentError, match="stages_per_rank"):
        pipeline_called("interleaved")(4, 8, stages_per_rank=0)
    with pytest.raises(InvalidArgumentError, match="fewer micro-batches"):
        pipeline_called("gpipe")(1024, 60_000)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": []}, "ranks"),
        ({"placement": [0, 2]}, "placement"),
        ({"placement": [0, 0]}, "rank 1 has no stage"),
        ({"placement": []}, "placement"),
        ({"placement": "01"}, "placement"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"ranks": [[("forward", 0, 0)], []]}, "not a PipelineAction"),
        ({"ranks": [[PipelineAction("sideways", 0, 0)], []]}, "'sideways' is none of"),  # type: ignore[arg-type]
        ({"ranks": [[PipelineAction("forward", 2, 0)], []]}, "stage 2 is not one of 2"),
        ({"ranks": [[PipelineAction("forward", 0, -1)], []]}, "micro-batch -1"),
        ({"ranks": [[PipelineAction("forward", 0, 0.0)], []]}, "whole numbers"),  # type: ignore[arg-type]
    ],
)
def test_what_is_not_well_formed(options: dict[str, object], said: str) -> None:
    fields: dict[str, object] = {"ranks": [[], []], "micro_batches": 1, **options}
    with pytest.raises(ScheduleError, match=said):
        PipelineSchedule(**fields)  # type: ignore[arg-type]


# ---- JSON


@pytest.mark.parametrize("word", WORDS)
def test_json_both_ways(word: str, tmp_path: object) -> None:
    for size, micro_batches, each in [(1, 1, 1), (2, 4, 1), (4, 8, 1)]:
        maker = pipeline_called(word)
        schedule = maker(size, micro_batches, stages_per_rank=each + maker.interleaves)
        again = pipeline_from_json(pipeline_to_json(schedule))
        for field in ("ranks", "micro_batches", "placement", "name"):
            assert getattr(again, field) == getattr(schedule, field)
    save_pipeline(schedule, f"{tmp_path}/mine.json")
    assert load_pipeline(f"{tmp_path}/mine.json").ranks == schedule.ranks


PLAIN = '{"roundelay_pipeline": 1, "micro_batches": 1, "ranks": [[%s]]}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "must be an object"),
        ("{", "is not JSON"),
        ('{"roundelay_pipeline": 1, "micro_batches": 1}', "lacks 'ranks'"),
        ('{"roundelay_pipeline": 2, "micro_batches": 1, "ranks": [[]]}', "must be 1"),
        ('{"roundelay_pipeline": 1, "micro_batches": 1, "ranks": []}', "is empty"),
        ('{"roundelay_pipeline": 1, "micro_batches": 99999, "ranks": [[]]}', "65536"),
        ('{"roundelay_pipeline": 1, "micro_batches": 1, "ranks": [[]], "x": 1}', "has no 'x'"),
        ('{"roundelay_pipeline": 1, "micro_batches": 1, "ranks": [[]], "placement": [1]}',
         r"placement\[0\]"),
        ('{"roundelay_pipeline": 1, "micro_batches": 1, "ranks": [[], []], "placement": [1]}',
         "rank 0 has no stage"),
        (PLAIN % '{"kind": "forward", "stage": 0}', r"ranks\[0\]\[0\]: lacks 'micro_batch'"),
        (PLAIN % '{"kind": "sleep", "stage": 0, "micro_batch": 0}', r"ranks\[0\]\[0\].kind"),
        (PLAIN % '{"kind": [], "stage": 0, "micro_batch": 0}', r"ranks\[0\]\[0\].kind"),
        (PLAIN % '{"kind": "forward", "stage": 1, "micro_batch": 0}', r"ranks\[0\]\[0\].stage"),
        (PLAIN % '{"kind": "forward", "stage": 0, "micro_batch": true}', "micro_batch"),
    ],
)  # fmt: skip
def test_json_that_is_wrong_says_where(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        pipeline_from_json(text)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ScheduleError, match="can't be read"):
        load_pipeline("/nowhere/mine.json")
    with pytest.raises(ScheduleError, match="can't be written"):
        save_pipeline(pipeline_called("gpipe")(1, 1), "/nowhere/mine.json")
