"""What a launcher tells a process: which rank it is, and how it finds the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roundelay.rendezvous.one_host import Job

__all__ = ["JobPlace"]


@dataclass(frozen=True, slots=True)
class JobPlace:
    """The place of this process among the ranks of a job, and by what they find one another.

    By `host`: all ranks are on this one. By `store`: torch's, because there may be several hosts.
    By `mpi`: MPI itself knows; rank and size are then its business.
    """

    rank: int
    job: Job
    by: Literal["host", "store", "mpi"] = "host"
