"""The oracle: all ranks in one process, one numpy array per cell, nothing clever."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from roundelay.engines._base import Engine
from roundelay.engines._inputs import ScheduleBuffer, cut_out, prepare
from roundelay.engines._run_schedule import RankInput, ScheduleRunner
from roundelay.reductions import Array, Op, Reduction, fold, reduction
from roundelay.schedule import Cell, Schedule, prove, replay

__all__ = ["Reference"]


class Reference(Engine):
    """Runs any schedule for all ranks in a loop; slow, readable, and what every engine must equal.

    It has no ranks that communicators could stand on: `run_schedule` and `trace` are all there is.

    >>> from roundelay.algorithms import algorithms
    >>> from roundelay.engines import run_schedule
    >>> ring = algorithms.load("all_reduce_ring").schedule(4)
    >>> run_schedule(ring, [np.array([r, r]) for r in (1, 2, 3, 4)], "reference")[0]
    array([10, 10])
    """

    @classmethod
    def runner(cls) -> ScheduleRunner:
        """Return the loop."""
        return _Loop()

    @staticmethod
    def trace(
        schedule: Schedule,
        inputs: Sequence[ScheduleBuffer | None],
        *,
        op: str | Op = "sum",
        counts: Sequence[int] | None = None,
    ) -> Iterator[dict[Cell, Array]]:
        """Yield what every cell holds before the first step and after each."""
        chosen, arrays, layout = prepare(schedule, inputs, op=op, counts=counts)
        return _trace(schedule, arrays, layout.counts, chosen)


class _Loop(ScheduleRunner):
    def outputs(
        self, schedule: Schedule, brought: Sequence[RankInput], op: Op | None
    ) -> Sequence[Array | None]:
        """Take every step for all ranks; see what each then holds."""
        arrays, counts = [each.array for each in brought], brought[0].counts
        chosen = reduction(op or brought[0].op)
        (cells,) = deque(_trace(schedule, arrays, counts, chosen), maxlen=1)
        held: dict[int, list[Array]] = {}
        for cell, _ in sorted(schedule.due_after()):
            if cell not in cells:
                prove(schedule)  # says which transfer is missing
            held.setdefault(cell.rank, []).append(cells[cell])
        return [
            np.concatenate(held[rank]) if rank in held else None for rank in range(schedule.size)
        ]


def _trace(
    schedule: Schedule,
    arrays: Sequence[Array | None],
    counts: Sequence[int],
    by: Reduction,
) -> Iterator[dict[Cell, Array]]:
    cells = {
        Cell(rank, chunk): part
        for rank, array in enumerate(arrays)
        for chunk, part in cut_out(schedule, rank, np.zeros(0) if array is None else array, counts)
    }
    yield cells

    everyone = (1 << schedule.size) - 1
    for step in replay(schedule):
        written = {}
        for write in step.writes:
            operands = [cells[Cell(src, write.cell.chunk)] for src in write.sources]
            complete = by.name == "avg" and write.value.ranks == everyone
            divide_by = schedule.size if complete and len(operands) > 1 else None
            written[write.cell] = fold(by, operands, divide_by=divide_by)
        cells = {**cells, **written}
        yield cells
