"""A barrier that names the ranks that do not come, and breaks nothing."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveTimeout

TAG = 1 << 61  # above all that users can pass, which are C ints
POLL_S = 0.0005
LATER_S = 0.5  # so that all give up for the reason that rank 0 gives


class _Awaited:
    """A message that is waited for until it comes, if need be across calls."""

    def __init__(self, comm: Communicator, src: int, length: int) -> None:
        self.numbers = np.zeros(length, np.int64)
        self._letter = comm.start.recv(self.numbers, src, TAG)

    def done(self) -> bool:
        if not self._letter.done():
            return False
        self._letter.wait()
        return True


class MonitoredBarrier:
    """Everybody reports to rank 0, which tells everybody who is missing.

    Messages are polled for and never waited for: a rank that does not come is an error here, but
    the group can still be used.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._calls = comm, 0
        self._awaited: dict[int, _Awaited] = {}  # by source; what came too late is for the next

    def run(self, seconds: float, *, all_ranks: bool) -> None:
        """Return when every rank has come; raise on every rank if one has not in time."""
        limit = time.monotonic() + seconds
        here, name, took = self._comm.rank, "monitoredBarrier", f"{seconds * 1000:g} ms"
        absent = self._gather(limit) if here == 0 else self._report(limit)
        if absent == []:
            return
        named = (absent or [])[: None if all_ranks else 1]
        who = f"Rank {named[0]}" if len(named) == 1 else f"Ranks {', '.join(map(str, named))}"
        text = f"{who} failed to pass {name} in {took}." if named else ""
        if here == 0 and not seconds:
            text = f"Rank 0 timed out in {name} after {took}. {text}"
        elif here:  # as gloo says it, whose users look for it
            text = (
                f"Rank {here} successfully reached {name}, but received errors while waiting for "
                f"send/recv from rank 0. {text or f'Rank 0 did not answer in {took}.'}"
            )
        raise CollectiveTimeout(text)

    def _gather(self, limit: float) -> list[int]:
        others = range(1, self._comm.size)
        letters = {rank: self._await(rank, 1) for rank in others}
        _poll(lambda: all(letter.done() for letter in letters.values()), limit)
        came = [rank for rank in others if letters[rank].done()]
        absent = [rank for rank in others if rank not in came]
        for rank in came:
            number = self._awaited.pop(rank).numbers[0]
            flags = [int(other in absent) for other in range(self._comm.size)]
            self._comm.start.send(np.array([number, *flags]), rank, TAG)
        return absent

    def _report(self, limit: float) -> list[int] | None:
        """Return who is missing, as rank 0 says; None if it says nothing."""
        self._calls += 1
        self._comm.start.send(np.array([self._calls]), 0, TAG)
        while True:
            if not _poll(self._await(0, 1 + self._comm.size).done, limit + LATER_S):
                return None
            number, *flags = self._awaited.pop(0).numbers.tolist()
            if number == self._calls:  # else it answers a call that was given up
                return [rank for rank, flag in enumerate(flags) if flag]

    def _await(self, src: int, length: int) -> _Awaited:
        if src not in self._awaited:
            self._awaited[src] = _Awaited(self._comm, src, length)
        return self._awaited[src]


def _poll(done: Callable[[], bool], limit: float) -> bool:
    while not done():
        if time.monotonic() > limit:
            return False
        time.sleep(POLL_S)
    return True


def also_for_ours(of_torch: Callable[..., None]) -> Callable[..., None]:
    """Return `monitored_barrier` for our groups too: torch's own refuses all but gloo's."""

    @functools.wraps(of_torch)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002 - as torch has it
    ) -> None:
        chosen: Any = group or dist.group.WORLD
        if not hasattr(chosen, "run_monitored_barrier"):
            of_torch(group, timeout, wait_all_ranks)
        else:
            chosen.run_monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    return monitored_barrier
