"""Bytes that a rank needs at its fullest moment, by what they are for."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import lru_cache

from roundelay.planning.activations import kept_around, kept_by_layer
from roundelay.planning.candidate import Candidate, Task
from roundelay.planning.held import ByteWidths, Held, bucket_rows, served, whole_everywhere, zero
from roundelay.planning.model import ModelShape
from roundelay.planning.rows import GATHERED_AHEAD

__all__ = ["RankBytes", "bytes_on", "fullest_rank", "rows_of"]


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What one rank holds: what the ledger counts between steps, and what comes and goes."""

    held: Held  # with buffers for communication as its transient
    gathered: int  # units of ZeRO-3 that are whole for a while
    activations: int
    stage: int = 0  # of a pipeline

    @property
    def transient(self) -> int:
        """Buffers for communication, and gathered units."""
        return self.held.transient + self.gathered

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer state: what ZeRO's paper counts."""
        return self.held.parameters + self.held.gradients + self.held.optimizer

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.transient + self.activations


def fullest_rank(task: Task, candidate: Candidate) -> RankBytes:
    """Return the bytes of the rank that needs most: on the first stage of a pipeline or the last.

    The first keeps activations of most micro-batches; the last has the head and the logits.
    """
    stages = candidate.mesh.pp
    found = [bytes_on(task, candidate, stage) for stage in sorted({0, stages - 1})]
    return max(found, key=lambda one: one.total)


def bytes_on(task: Task, candidate: Candidate, stage: int) -> RankBytes:
    """Return the bytes of a rank of one stage of the pipeline, or of the only one."""
    mesh = candidate.mesh
    several = candidate.micro_batches(task) > 1
    held = _held(task.model, (mesh.tp, mesh.pp, stage), candidate.strategy, candidate.widths(task),
                 mesh.data, bucket=task.bucket, several=several)  # fmt: skip
    gathered = 0
    if candidate.strategy == "zero3" and mesh.data > 1:
        around, *layers = _units(task.model, mesh.tp, mesh.pp, stage)
        largest = heapq.nlargest(GATHERED_AHEAD, layers)
        gathered = (around + sum(largest)) * candidate.widths(task).parameter
    return RankBytes(held, gathered, _activations(task, candidate, stage), stage)


def rows_of(task: Task, candidate: Candidate, stage: int) -> list[int]:
    """Return the elements of the rows that ZeRO divides on one stage: units, or buckets."""
    mesh = candidate.mesh
    if candidate.strategy == "zero3" and mesh.data > 1:
        return [row for row in _units(task.model, mesh.tp, mesh.pp, stage) if row]
    return _rows(task.model, mesh.tp, mesh.pp, stage, task.bucket)


@lru_cache(maxsize=256)
def _units(model: ModelShape, tp: int, pp: int, stage: int) -> list[int]:
    return [sum(unit) for unit in model.divided(tp).units(pp, stage)]


@lru_cache(maxsize=256)
def _rows(model: ModelShape, tp: int, pp: int, stage: int, bucket: int) -> list[int]:
    return bucket_rows(model.divided(tp).tensors(pp, stage), bucket)


@lru_cache(maxsize=4096)
def _held(
    model: ModelShape,
    part: tuple[int, int, int],  # ranks along tp, stages, and which
    strategy: str,
    width: ByteWidths,
    size: int,
    *,
    bucket: int,
    several: bool,
) -> Held:
    units = _units(model, *part)
    if strategy == "ddp":
        return whole_everywhere(sum(units), width)
    if strategy.startswith("ps"):
        return served(sum(units), width, workers=size, together=strategy == "ps")
    number = int(strategy[-1])
    rows = units if strategy == "zero3" and size > 1 else _rows(model, *part, bucket)
    return zero([row for row in rows if row], width, stage=number, size=size, several=several)


def _activations(task: Task, candidate: Candidate, stage: int) -> int:
    """Return what is kept for backward, of as many micro-batches as 1F1B has in flight here."""
    model, mesh, kept = task.model, candidate.mesh, candidate.kept(task)
    rows, sequence = candidate.micro_batch, task.sequence
    last = stage == mesh.pp - 1
    flying = min(candidate.micro_batches(task), mesh.pp - stage)
    layers = model.layers // mesh.pp
    each = kept_by_layer(model, rows, sequence, kept)
    around = kept_around(model, rows, sequence, kept, last=last)
    total = flying * (layers * each + around)
    if kept.recompute == "full":  # one layer at a time is there once more
        total += kept_by_layer(model, rows, sequence, replace(kept, recompute="none"))
    return total
