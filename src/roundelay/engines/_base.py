"""What every engine gives: run a schedule on all its ranks, and hand back what each rank got."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from roundelay.reductions import Array, Located, Op
from roundelay.schedule import Schedule

__all__ = ["Buffer", "Engine"]

Buffer = Array | Located


class Engine(Protocol):
    """Runs schedules on buffers. One file per engine; `reference.py` is the readable one."""

    def run(
        self,
        schedule: Schedule,
        inputs: Sequence[Buffer | None],
        *,
        op: str | Op = "sum",
        counts: Sequence[int] | None = None,
    ) -> list[Buffer | None]:
        """Return each rank's output, flat; None where the contract leaves a rank nothing.

        `inputs[rank]` holds the blocks that the contract gives that rank, one after the other.
        `counts` gives the elements of every block; by default a rank's blocks are equally long.
        """
