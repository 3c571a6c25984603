"""What ranks tell the launcher that started them: by lines, on a pipe.

The launcher starts processes and sees how they end, but what that means for the job is in the
memory that they share. So a rank without which the job goes on says so beforehand; and a rank that
raises says whose failure came first, which need not be the first that has ended.
"""

from __future__ import annotations

import contextlib
import os

from roundelay.errors import CommunicationError
from roundelay.processes.death import CONSEQUENCES

__all__ = ["BLAMES", "VARIABLE", "tell_blame", "tell_launcher"]

#: The descriptor, and the number of the pipe, so that none is mistaken.
VARIABLE = "ROUNDELAY_SPARED"
BLAMES = "blames"


def tell_launcher(rank: int, what: str) -> None:
    """Say it from a rank; nothing where no `roundelay run` is listening."""
    fd, _, number = os.environ.get(VARIABLE, "").partition(":")
    with contextlib.suppress(OSError, ValueError):
        if os.fstat(int(fd)).st_ino == int(number):
            os.write(int(fd), f"{rank} {what}\n".encode())


def tell_blame(rank: int, error: BaseException, first: int | None) -> None:
    """Say whose failure was first: `first`, where ranks know; else whose end the error tells of."""
    if first is None and isinstance(error, CommunicationError):
        first = error.ended
    if first is None and type(error).__name__ not in CONSEQUENCES:
        first = rank
    tell_launcher(rank, f"{BLAMES} {first}")
