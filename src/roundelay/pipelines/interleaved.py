"""Interleaved 1F1B: every rank has several stages, far apart, and the bubble shrinks with them."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.pipelines._base import PipelineAction, known_as

__all__ = ["interleaved"]


@known_as(
    "interleaved-1f1b",
    idle=lambda ranks, forward, inputs, weights: (ranks - 1) * (forward + inputs + weights),
    formula="(p - 1) / (v m + p - 1)",
    interleaves=True,
    multiple=True,
)
def interleaved(
    rank: int, size: int, micro_batches: int, stages_per_rank: int
) -> Iterator[PipelineAction]:
    """Go round the ranks with smaller stages: v of them on each rank make the bubble v times less.

    Micro-batches go in rounds of p: p of them through a rank's first stage, then through its
    second, and so on. Each sends v times the messages. More activations are kept than by 1F1B.
    """

    def nth(number: int, *, back: bool) -> tuple[int, int]:
        """Return stage and micro-batch of the rank's n-th forward, or backward."""
        turn, place = divmod(number, size * stages_per_rank)
        local, within = divmod(place, size)
        if back:
            local = stages_per_rank - 1 - local
        return local * size + rank, turn * size + within

    total = micro_batches * stages_per_rank
    ahead = min(total, 2 * (size - 1 - rank) + (stages_per_rank - 1) * size)
    for number in range(total + ahead):
        if number < total:
            yield PipelineAction("forward", *nth(number, back=False))
        if number >= ahead:
            yield PipelineAction("backward", *nth(number - ahead, back=True))
