"""What a pipeline schedule costs: its timeline, how long it is, and how much of it is bubble."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from roundelay.errors import InvalidArgumentError
from roundelay.pipelines._base import PipelineAction, PipelineSchedule
from roundelay.pipelines._prove import prove_pipeline
from roundelay.pipelines._replay import PipelineSpan, replay_pipeline


@dataclass(frozen=True, slots=True)
class StageCosts:
    """How long one micro-batch takes at a stage; a whole backward pass is the latter two."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0

    def __post_init__(self) -> None:
        for name in ("forward", "input_grad", "weight_grad"):
            _check(f"StageCosts: {name}", getattr(self, name))

    def of(self, action: PipelineAction) -> float:
        """Return what an action costs."""
        if action.kind == "backward":
            return self.input_grad + self.weight_grad
        cost: float = getattr(self, action.kind)
        return cost


@dataclass(frozen=True, slots=True)
class PipelinePrice:
    """A schedule in time: when every rank does what, and for how long it has nothing to do."""

    spans: tuple[tuple[PipelineSpan, ...], ...]
    makespan: float
    busy: tuple[float, ...]  # of every rank

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait."""
        total = self.makespan * len(self.busy)
        return 1 - sum(self.busy) / total if total else 0.0


def price_pipeline(
    schedule: PipelineSchedule,
    costs: StageCosts | Sequence[StageCosts] | None = None,
    *,
    transfer: float = 0.0,
) -> PipelinePrice:
    """Return the timeline of a schedule that is proved, in whatever unit the costs have.

    `costs` are those of every stage, or one by one; `transfer` is how long an activation, or its
    gradient, takes from rank to rank.

    >>> from roundelay.pipelines import pipeline_called
    >>> priced = price_pipeline(pipeline_called("1f1b")(4, 8))
    >>> priced.makespan, round(priced.bubble, 4)  # 3 / 11
    (33.0, 0.2727)
    """
    prove_pipeline(schedule)
    each = StageCosts() if costs is None else costs
    listed = [each] * schedule.stages if isinstance(each, StageCosts) else list(each)
    if len(listed) != schedule.stages:
        raise InvalidArgumentError(
            f"price_pipeline got costs of {len(listed)} stages, and {schedule.name} has "
            f"{schedule.stages}."
        )
    _check("transfer of price_pipeline", transfer)
    spans = replay_pipeline(
        schedule, lambda action: listed[action.stage].of(action), transfer
    ).spans
    return PipelinePrice(
        spans,
        makespan=max(span.end for mine in spans for span in mine),
        busy=tuple(math.fsum(span.end - span.start for span in mine) for mine in spans),
    )


def _check(what: str, value: float) -> None:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise InvalidArgumentError(f"{what} is a number from 0, not {value!r}.")
