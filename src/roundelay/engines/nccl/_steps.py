"""The transfers of one step of a schedule, handed to NCCL together.

NCCL begins a send only when its receive has begun, in the order of the calls; two ranks that first
send to each other would wait forever. What is posted together has no order.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from roundelay.engines.gloo.groups import as_tensor
from roundelay.reductions import Array

__all__ = ["Step"]

SLOT = 1


class Step:
    """Sends and receives that begin when the first of them is waited for."""

    def __init__(self, torch: Any, group: Any, library: str, limit: timedelta) -> None:
        self._torch, self._group, self._together = torch, group, library == "nccl"
        self._device = "cuda" if self._together else "cpu"
        self._limit = limit
        self._posted: list[_Posted] = []
        self.gone = False  # on its way: what is posted now belongs to the next one

    def post(self, data: Array, other: int, *, sends: bool) -> _Posted:
        """Add a transfer; bytes of the host go by memory of the device."""
        posted = _Posted(self, as_tensor(self._torch, data), other, sends=sends)
        posted.moved = posted.host.to(self._device)
        self._posted.append(posted)
        return posted

    def go(self) -> None:
        """Begin all, and return when all are there."""
        if self.gone:
            return
        self.gone = True
        group = self._group
        if self._together:
            group._start_coalescing()  # noqa: SLF001 - as torch's batch_isend_irecv does
        works = [
            (group.send if each.sends else group.recv)([each.moved], each.other, SLOT)
            for each in self._posted
        ]
        if self._together:
            works = [group._end_coalescing()]  # noqa: SLF001
        for work in works:
            work.wait(self._limit)
        for each in self._posted:
            if not each.sends:
                each.host.copy_(each.moved)


class _Posted:
    """One transfer of a step."""

    moved: Any  # the bytes in memory of the device

    def __init__(self, step: Step, host: Any, other: int, *, sends: bool) -> None:
        self._step, self.host, self.other, self.sends = step, host, other, sends

    def done(self) -> bool:
        return self._step.gone

    def wait(self) -> None:
        self._step.go()
