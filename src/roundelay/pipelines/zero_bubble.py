"""Zero bubble (ZB-H1): backward in two halves, of which the second fills the bubble."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.pipelines._base import PipelineAction, known_as

__all__ = ["zero_bubble"]


@known_as(
    "zb-h1",
    idle=lambda ranks, forward, inputs, weights: (ranks - 1) * (forward + inputs - weights),
    formula="(p - 1) (F + B - W) / (m (F + B + W) + (p - 1) (F + B - W))",
)
def zero_bubble(rank: int, size: int, micro_batches: int, _: int) -> Iterator[PipelineAction]:
    """Send gradients of inputs back at once, and compute those of weights when there is time.

    Rank r is r micro-batches late with its weights, so every rank keeps at most p activations, no
    more than 1F1B's first. Where the three parts cost alike the bubble is a third of 1F1B's.
    """
    ahead, late = min(size - 1 - rank, micro_batches), rank
    for number in range(micro_batches + ahead + late):
        if number < micro_batches:
            yield PipelineAction("forward", rank, number)
        if ahead <= number < micro_batches + ahead:
            yield PipelineAction("input_grad", rank, number - ahead)
        if number >= ahead + late:
            yield PipelineAction("weight_grad", rank, number - ahead - late)
