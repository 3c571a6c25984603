"""Ranks agree on what they are about to do, before MPI does it.

MPI takes it for granted that all ranks make the same call. When they do not, it hangs, gives wrong
numbers or crashes. So every call begins with two numbers that all ranks compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from roundelay import _core
from roundelay.collectives import collectives
from roundelay.engines._end import Job
from roundelay.engines._mpi_progress import Requests, Steps
from roundelay.errors import CollectiveMismatch

__all__ = ["Agreement", "Plan", "plan_of"]

LONGEST = 512  # bytes of a description that others see


@dataclass(frozen=True, slots=True)
class Plan:
    """What a rank is about to do: in words, by what makes it different, and where it says so."""

    what: str
    details: str = ""
    site: str = ""

    @property
    def number(self) -> int:
        """Tell plans apart."""
        said = f"{self.what} {self.details}".encode()
        return int.from_bytes(blake2b(said, digest_size=7).digest(), "little")

    def __str__(self) -> str:
        return f"{self.what}{f' at {self.site}' if self.site else ''}"


def plan_of(job: Job, algorithm: str | None) -> Plan:
    """Return what a job is to others."""
    site = _user_site()
    if job.collective == "barrier":
        return Plan("barrier", algorithm or "", site)
    kind = collectives.load(job.collective)
    count = sum(job.counts) if job.counts else job.count
    op = f" op={job.op}" if kind.reduces else ""
    root = f" root={job.root}" if kind.rooted else ""
    forced = f" algorithm={algorithm}" if algorithm else ""
    what = f"{job.collective} {job.dtype}[{count}]{op}{root}{forced}"
    return Plan(what, " ".join(map(str, job.counts)), site)


class Agreement:
    """Compares the plans of the ranks of one MPI communicator."""

    def __init__(self, mpi: Any, comm: Any) -> None:  # without types, see load_mpi
        self._mpi, self._comm = mpi, comm
        self._size: int = comm.Get_size()
        _core.set_package(f"{Path(__file__).parent.parent}/")  # whose lines no error shows

    def steps(self, plan: Plan) -> Steps:
        """Go on if all ranks plan the same; otherwise raise, on all of them, who plans what."""
        if self._size == 1:
            return
        number = plan.number
        both = np.array([number, -number], np.int64)
        send, kept = [both, self._mpi.INT64_T], np.empty_like(both)
        call = self._comm.Iallreduce(send, [kept, self._mpi.INT64_T], self._mpi.MAX)
        yield [Requests([call], both, kept)]
        if kept[0] == -kept[1]:
            return
        mine = np.zeros(LONGEST, np.uint8)
        said = str(plan).encode()[:LONGEST]
        mine[: len(said)] = np.frombuffer(said, np.uint8)
        every = np.empty((self._size, LONGEST), np.uint8)
        call = self._comm.Iallgather([mine, self._mpi.BYTE], [every, self._mpi.BYTE])
        yield [Requests([call], mine, every)]
        words = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in every]
        raise CollectiveMismatch(f"The ranks made different calls:\n{_table(words)}")


def _table(words: Sequence[str]) -> str:
    """List who called what; one line for all ranks that did the same."""
    seen: dict[str, list[str]] = {}
    for rank, what in enumerate(words):
        seen.setdefault(what, []).append(str(rank))
    return "\n".join(
        f"  {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}: {what}"
        for what, ranks in seen.items()
    )


def _user_site() -> str:
    """Return the line of the program that made the call, if there is one."""
    place = _core.caller()
    if place is None:
        return ""
    code, _, line = place
    path = Path(code.co_filename)
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"
