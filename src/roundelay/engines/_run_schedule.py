"""One schedule on all its ranks: what every rank brings, and what each gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from roundelay.engines._inputs import ScheduleBuffer, outgoing, prepare
from roundelay.reductions import LOGICAL, Array, Op
from roundelay.schedule import Schedule


@dataclass(frozen=True, slots=True)
class RankInput:
    """What one rank brings to a schedule, and what it must know of the others."""

    array: Array | None
    dtype: np.dtype[Any]  # of all ranks, also of those that bring nothing
    op: str
    counts: tuple[int, ...]


class ScheduleRunner(ABC):
    """Runs schedules from outside, for all ranks at once; what it keeps ends with `close`."""

    def run(
        self,
        schedule: Schedule,
        inputs: Sequence[ScheduleBuffer | None],
        *,
        op: str | Op = "sum",
        counts: Sequence[int] | None = None,
    ) -> list[ScheduleBuffer | None]:
        """Run a schedule on all its ranks; return each rank's output, flat.

        `inputs[rank]` holds the blocks that the contract gives that rank, one after the other.
        `counts` gives the elements of every block; by default a rank's blocks are equally long.
        The output is None where the contract leaves a rank nothing.
        """
        reduction, arrays, layout = prepare(schedule, inputs, op=op, counts=counts)
        dtype = next((array.dtype for array in arrays if array is not None), np.dtype(np.uint8))
        brought = [RankInput(array, dtype, reduction.name, layout.counts) for array in arrays]
        outputs = self.outputs(schedule, brought, op if isinstance(op, Op) else None)
        if op in LOGICAL and schedule.collective.reduces:  # 0 and 1 also of a lone contribution
            outputs = [None if one is None else (one != 0).astype(one.dtype) for one in outputs]
        return [None if output is None else outgoing(output) for output in outputs]

    @abstractmethod
    def outputs(
        self, schedule: Schedule, brought: Sequence[RankInput], op: Op | None
    ) -> Sequence[Array | None]:
        """Return every rank's output for what it brings; `op` is a reduction of the user's own."""

    def close(self) -> None:  # noqa: B027 - one that loops keeps nothing
        """End what is kept for the next run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
