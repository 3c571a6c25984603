"""Where chunks lie in a buffer, in elements: the only place that cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from roundelay.arguments import indices_of, shown
from roundelay.errors import InvalidArgumentError, rank_count
from roundelay.schedule.schedule import Schedule

__all__ = ["Layout", "split"]


def split(numel: int, parts: int) -> list[slice]:
    """Cut `numel` elements into `parts` runs whose lengths differ by at most one.

    Longer runs come first; with fewer elements than parts, the last runs are empty.

    >>> split(7, 3)
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    base, extra = divmod(numel, parts)
    bounds = [part * base + min(part, extra) for part in range(parts + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]


@dataclass(frozen=True)
class Layout:
    """How many elements each block has, and hence each chunk."""

    schedule: Schedule
    counts: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Schedule, counts: Sequence[int]) -> Layout:
        """Lay out blocks of the given lengths, one per block of the contract."""
        blocks = schedule.collective.blocks(schedule.size)
        numbers = indices_of(counts)
        if numbers is None or len(numbers) != blocks or min(numbers, default=0) < 0:
            raise InvalidArgumentError(
                f"{schedule.collective.name} on {rank_count(schedule.size)} needs counts= of "
                f"{blocks} whole numbers from 0, not {shown(counts)}."
            )
        return cls(schedule, tuple(numbers))

    @classmethod
    def even(cls, schedule: Schedule, elements: int) -> Layout:
        """Cut the largest buffer of a rank, `elements` long, as evenly as it goes."""
        per_rank = schedule.collective.per_rank(schedule.size, schedule.root)
        lengths = [run.stop - run.start for run in split(elements, per_rank)]
        blocks = schedule.collective.blocks(schedule.size)
        return cls(schedule, tuple(lengths[block % per_rank] for block in range(blocks)))

    def chunk_lengths(self) -> list[int]:
        """Return the length of every chunk."""
        parts = self.schedule.parts
        return [run.stop - run.start for count in self.counts for run in split(count, parts)]
