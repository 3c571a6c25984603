"""The oracle: all ranks in one process, one numpy array per cell, nothing clever."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from roundelay.engines._base import Buffer
from roundelay.engines._inputs import outgoing, prepare
from roundelay.reductions import Array, Op, fold
from roundelay.schedule import Cell, Layout, Schedule, prove, replay, split

__all__ = ["Reference"]


class Reference:
    """Runs any schedule for all ranks in a loop; slow, readable, and what every engine must equal.

    >>> from roundelay.algorithms import algorithms
    >>> ring = algorithms.load("all_reduce_ring").schedule(4)
    >>> Reference().run(ring, [np.array([r, r]) for r in (1, 2, 3, 4)])[0]
    array([10, 10])
    """

    def run(
        self,
        schedule: Schedule,
        inputs: Sequence[Buffer | None],
        *,
        op: str | Op = "sum",
        counts: Sequence[int] | None = None,
    ) -> list[Buffer | None]:
        """Return each rank's output, flat; None where the contract leaves a rank nothing."""
        (cells,) = deque(self.trace(schedule, inputs, op=op, counts=counts), maxlen=1)
        outputs: dict[int, list[Array]] = {}
        for cell, _ in sorted(schedule.due_after()):
            if cell not in cells:
                prove(schedule)  # says which transfer is missing
            outputs.setdefault(cell.rank, []).append(cells[cell])
        return [
            outgoing(np.concatenate(outputs[rank])) if rank in outputs else None
            for rank in range(schedule.size)
        ]

    def trace(
        self,
        schedule: Schedule,
        inputs: Sequence[Buffer | None],
        *,
        op: str | Op = "sum",
        counts: Sequence[int] | None = None,
    ) -> Iterator[dict[Cell, Array]]:
        """Yield what every cell holds before the first step and after each."""
        made, arrays, layout = prepare(schedule, inputs, op=op, counts=counts)
        cells = dict(_cut(schedule, arrays, layout))
        yield cells

        everyone = (1 << schedule.size) - 1
        for step in replay(schedule):
            written = {}
            for write in step.writes:
                operands = [cells[Cell(src, write.cell.chunk)] for src in write.sources]
                complete = made.name == "avg" and write.value.ranks == everyone
                folded = len(operands) > 1
                written[write.cell] = fold(
                    made, operands, divide_by=schedule.size if complete and folded else None
                )
            cells = {**cells, **written}
            yield cells


def _cut(
    schedule: Schedule, arrays: Sequence[Array | None], layout: Layout
) -> Iterator[tuple[Cell, Array]]:
    """Cut every rank's input into its blocks, and every block into its parts."""
    for rank, array in enumerate(arrays):
        data = np.zeros(0) if array is None else array
        start = 0
        for block in schedule.collective.before(schedule.size, schedule.root, rank):
            whole = data[start : start + layout.counts[block]]
            start += layout.counts[block]
            for chunk, run in zip(
                schedule.chunks_of(block), split(len(whole), schedule.parts), strict=True
            ):
                yield Cell(rank, chunk), whole[run]
