"""Proof of a pipeline schedule: all is done once, in order, on the right rank, and nobody hangs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from roundelay.errors import ProofError
from roundelay.pipelines._base import PipelineAction, PipelineSchedule
from roundelay.pipelines._replay import replay_pipeline

PipelineProblem = Literal["missing", "doubled", "misplaced", "too early", "deadlock"]
#: A schedule that fails this often is not read to its end for more.
ENOUGH = 1000


@dataclass(frozen=True, slots=True)
class PipelineFailure:
    """One way in which a pipeline schedule fails, and where.

    >>> print(PipelineFailure("missing", 2, PipelineAction("forward", 2, 5), "never done"))
    rank 2, stage 2, micro-batch 5, forward: missing: never done
    """

    kind: PipelineProblem
    rank: int
    action: PipelineAction
    detail: str

    def __str__(self) -> str:
        kind, stage, micro_batch = self.action
        place = f"rank {self.rank}, stage {stage}, micro-batch {micro_batch}, {kind}"
        return f"{place}: {self.kind}: {self.detail}"


@dataclass(frozen=True, slots=True)
class PipelineProof:
    """What is known of a schedule that was proved.

    `peaks` says for every rank of how many micro-batches it keeps activations at most, each counted
    once for every stage of the rank; `messages` how often data goes from rank to rank, forward and
    backward.
    """

    peaks: tuple[int, ...]
    messages: int


def prove_pipeline(schedule: PipelineSchedule) -> PipelineProof:
    """Return the proof, or raise `ProofError` that names rank, stage, micro-batch and action.

    Every micro-batch passes every stage forward, then backward, once each and on the stage's rank;
    split backward passes come in order; and nobody waits in a circle.

    >>> from roundelay.pipelines import pipeline_called
    >>> prove_pipeline(pipeline_called("1f1b")(4, 8))
    PipelineProof(peaks=(4, 3, 2, 1), messages=48)
    """
    failures = find_pipeline_failures(schedule)
    if failures:
        raise ProofError(f"The pipeline {schedule.name}", failures)
    crossings = sum(
        a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False)
    )
    return PipelineProof(
        peaks=tuple(_peak(schedule, rank) for rank in range(schedule.size)),
        messages=2 * crossings * schedule.micro_batches,
    )


def find_pipeline_failures(schedule: PipelineSchedule) -> list[PipelineFailure]:
    """List the failures of a schedule; empty when it is proved."""
    found: list[PipelineFailure] = []
    for source in (_misplaced, _counted, _stuck):
        # Who waits is told only where all is there to be waited for.
        for failure in source(schedule) if not (found and source is _stuck) else ():
            found.append(failure)
            if len(found) == ENOUGH:
                return found
    return found


def _misplaced(schedule: PipelineSchedule) -> Iterator[PipelineFailure]:
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            owner = schedule.placement[action.stage]
            if owner != rank:
                detail = f"stage {action.stage} is on rank {owner}"
                yield PipelineFailure("misplaced", rank, action, detail)


def _counted(schedule: PipelineSchedule) -> Iterator[PipelineFailure]:
    """Yield what is done not at all, or again."""
    times: dict[PipelineAction, int] = {}
    for actions in schedule.ranks:
        for action in actions:
            times[action] = times.get(action, 0) + 1
    for stage, micro_batch in product(range(schedule.stages), range(schedule.micro_batches)):
        rank = schedule.placement[stage]
        whole, first, then = (
            PipelineAction(kind, stage, micro_batch)
            for kind in ("backward", "input_grad", "weight_grad")
        )
        halves = first in times or then in times
        if halves and whole in times:
            detail = "its backward is split into input_grad and weight_grad, too"
            yield PipelineFailure("doubled", rank, whole, detail)
        due = [PipelineAction("forward", stage, micro_batch)]
        due += [first, then] if halves else [whole]
        for action in due:
            if action not in times:
                yield PipelineFailure("missing", rank, action, "no rank does it")
            elif times[action] > 1:
                detail = f"is done {times[action]} times"
                yield PipelineFailure("doubled", rank, action, detail)


def _stuck(schedule: PipelineSchedule) -> Iterator[PipelineFailure]:
    """Yield what comes before what it needs, and the ranks that wait for each other in a circle."""
    stuck = replay_pipeline(schedule, lambda _: 0.0).stuck
    waits = {rank: schedule.placement[need.stage] for rank, (_, need) in stuck.items()}
    early = False
    for rank, (action, need) in sorted(stuck.items()):
        if waits[rank] == rank:
            early = True
            detail = f"it needs the {need}, which comes later on this rank"
            yield PipelineFailure("too early", rank, action, detail)
    if early or not stuck:
        return
    rank = min(stuck)
    for _ in stuck:  # from any of them, so many steps lead into a circle
        rank = waits[rank]
    circle = [rank]
    while waits[circle[-1]] != rank:
        circle.append(waits[circle[-1]])
    for member in circle:
        action, need = stuck[member]
        other = waits[member]
        detail = (
            f"waits for the {need} of rank {other}, which itself waits for the {stuck[other][1]}"
        )
        yield PipelineFailure("deadlock", member, action, detail)


def _peak(schedule: PipelineSchedule, rank: int) -> int:
    """Count the activations that a rank keeps at most, from forward to the end of backward."""
    live = most = 0
    for kind, _, _ in schedule.ranks[rank]:
        live += (kind == "forward") - (kind in ("backward", "weight_grad"))
        most = max(most, live)
    return most
