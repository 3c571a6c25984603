"""GPipe: all micro-batches forward, then all of them backward."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.pipelines._base import PipelineAction, known_as

__all__ = ["gpipe"]


@known_as(
    "gpipe",
    idle=lambda ranks, forward, inputs, weights: (ranks - 1) * (forward + inputs + weights),
    formula="(p - 1) / (m + p - 1)",
)
def gpipe(rank: int, size: int, micro_batches: int, _: int) -> Iterator[PipelineAction]:
    """Send all micro-batches forward, then all back; simple, and keeps every activation.

    Every rank keeps activations of all m micro-batches.
    """
    del size
    for micro_batch in range(micro_batches):
        yield PipelineAction("forward", rank, micro_batch)
    for micro_batch in range(micro_batches):
        yield PipelineAction("backward", rank, micro_batch)
