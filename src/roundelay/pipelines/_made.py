"""A pipeline schedule as people ask for one: stages or ranks may be left out."""

from __future__ import annotations

from roundelay.errors import InvalidArgumentError, rank_count
from roundelay.pipelines._base import PipelineSchedule, pipeline_called
from roundelay.pipelines._price import StageCosts

__all__ = ["DEFAULT_MICRO_BATCHES", "DEFAULT_STAGES", "bubble_formula", "pipeline_for"]

DEFAULT_STAGES, DEFAULT_MICRO_BATCHES = 4, 8


def pipeline_for(
    word: str,
    *,
    stages: int | None = None,
    size: int | None = None,
    micro_batches: int | None = None,
) -> PipelineSchedule:
    """Return a schedule by name; one that interleaves has two stages a rank unless said.

    >>> pipeline_for("1f1b").size, pipeline_for("interleaved-1f1b", size=2).stages
    (4, 4)
    """
    maker = pipeline_called(word)
    if maker.interleaves:
        ranks = size if size is not None else max(1, (stages or 2 * DEFAULT_STAGES) // 2)
        count = stages if stages is not None else 2 * ranks
    else:
        count = stages if stages is not None else size if size is not None else DEFAULT_STAGES
        ranks = size if size is not None else count
    if ranks < 1 or count < 1 or count % ranks:
        raise InvalidArgumentError(
            f"{count} stages do not divide between {rank_count(ranks)}. Take --stages "
            f"{max(1, ranks) * max(1, round(count / max(1, ranks)))}."
        )
    batches = DEFAULT_MICRO_BATCHES if micro_batches is None else micro_batches
    return maker(ranks, batches, stages_per_rank=count // ranks)


def bubble_formula(word: str, schedule: PipelineSchedule, costs: StageCosts) -> str:
    """Return the formula of the bubble, if it holds here."""
    maker = pipeline_called(word)
    least = min(costs.forward, costs.input_grad)
    if maker.word == "zb-h1" and (
        schedule.micro_batches < schedule.size or costs.weight_grad > least
    ):
        return ""
    return maker.formula
