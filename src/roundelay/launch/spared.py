"""How `roundelay run` learns what ranks know: by lines from them, on a pipe.

The launcher starts processes and sees how they end, but what that means for the job is in the
memory that they share. So a rank without which the job goes on says so beforehand; and a rank that
raises says whose failure came first, which need not be the first that has ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from roundelay.processes.death import LOSSES

__all__ = ["BLAMES", "SpareLine", "tell_launcher"]

VARIABLE = (
    "ROUNDELAY_SPARED"  # the descriptor, and the number of the pipe, so that none is mistaken
)
BLAMES = "blames"
ROOM = 1 << 16


class SpareLine:
    """The launcher's end."""

    def __init__(self) -> None:
        self.read, self.fd = os.pipe()
        os.set_blocking(self.read, False)
        self._said: dict[int, str] = {}
        self.blamed: int | None = None  # the rank whose failure came first, as ranks say

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a rank, with where to say it."""
        return {**given, VARIABLE: f"{self.fd}:{os.fstat(self.fd).st_ino}"}

    def listen(self) -> None:
        """Take what has come; lines come whole."""
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self.read, ROOM).decode().splitlines():
                rank, word, *more = line.split()
                if word != BLAMES:
                    self._said[int(rank)] = word
                elif self.blamed is None and more[0].isdigit():
                    self.blamed = int(more[0])

    def loss_of(self, rank: int) -> str:
        """Return what the loss of a rank does to the job: one of `LOSSES`."""
        self.listen()
        return self._said.get(rank, LOSSES[0])

    def close(self) -> None:
        """Let go of both ends."""
        os.close(self.read)
        os.close(self.fd)


def tell_launcher(rank: int, what: str) -> None:
    """Say it from a rank; nothing where no `roundelay run` is listening."""
    fd, _, number = os.environ.get(VARIABLE, "").partition(":")
    with contextlib.suppress(OSError, ValueError):
        if os.fstat(int(fd)).st_ino == int(number):
            os.write(int(fd), f"{rank} {what}\n".encode())
