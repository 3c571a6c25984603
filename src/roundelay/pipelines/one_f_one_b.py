"""1F1B: as soon as the first micro-batch is through, one forward and one backward in turn."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.pipelines._base import PipelineAction, known_as

__all__ = ["one_f_one_b"]


@known_as(
    "1f1b",
    idle=lambda ranks, forward, inputs, weights: (ranks - 1) * (forward + inputs + weights),
    formula="(p - 1) / (m + p - 1)",
)
def one_f_one_b(rank: int, size: int, micro_batches: int, _: int) -> Iterator[PipelineAction]:
    """Alternate forward and backward, so that rank r keeps at most p - r activations.

    The bubble is GPipe's; the memory no longer grows with the number of micro-batches.
    """
    ahead = min(size - 1 - rank, micro_batches)
    for micro_batch in range(micro_batches + ahead):
        if micro_batch < micro_batches:
            yield PipelineAction("forward", rank, micro_batch)
        if micro_batch >= ahead:
            yield PipelineAction("backward", rank, micro_batch - ahead)
