"""When every action of a pipeline schedule begins and ends, or who waits for whom for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from roundelay.pipelines._base import PipelineAction, PipelineSchedule


class PipelineSpan(NamedTuple):
    """An action, and when it begins and ends."""

    action: PipelineAction
    start: float
    end: float


@dataclass(frozen=True)
class Replay:
    """Every rank's spans, and for ranks that did not come to their end what they wait for."""

    spans: tuple[tuple[PipelineSpan, ...], ...]
    stuck: dict[int, tuple[PipelineAction, PipelineAction]]  # what can't begin, and what it needs


def replay_pipeline(
    schedule: PipelineSchedule,
    duration: Callable[[PipelineAction], float],
    transfer: float = 0.0,
) -> Replay:
    """Run a schedule in thought: each rank in its order, each action when what it needs is there.

    Messages take `transfer` and hold up nobody but who waits for them.
    """
    spans: list[list[PipelineSpan]] = [[] for _ in schedule.ranks]
    ended: dict[PipelineAction, float] = {}
    waiting: dict[PipelineAction, list[int]] = {}  # ranks, by what they wait for
    stuck: dict[int, tuple[PipelineAction, PipelineAction]] = {}
    ready = list(range(schedule.size))
    while ready:
        rank = ready.pop()
        stuck.pop(rank, None)
        for action in schedule.ranks[rank][len(spans[rank]) :]:
            needs = list(schedule.needs(action))
            missing = next((need for need in needs if need not in ended), None)
            if missing is not None:
                stuck[rank] = action, missing
                waiting.setdefault(missing, []).append(rank)
                break
            arrivals = (
                ended[need] + (transfer if schedule.placement[need.stage] != rank else 0.0)
                for need in needs
            )
            start = max([spans[rank][-1].end if spans[rank] else 0.0, *arrivals])
            end = start + duration(action)
            spans[rank].append(PipelineSpan(action, start, end))
            ended[action] = end
            ready += waiting.pop(action, [])
    return Replay(tuple(map(tuple, spans)), stuck)
