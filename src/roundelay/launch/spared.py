"""The launcher's end of the pipe on which ranks tell it what they know."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from roundelay.processes.death import LOSSES
from roundelay.processes.launcher_line import BLAMES, VARIABLE

__all__ = ["SpareLine"]

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
