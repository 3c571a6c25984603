"""The traceback with which a rank ends: held back while it may be the last thing that rank says.

When one rank fails, the others fail because of it, and all print tracebacks. A traceback is kept
for the end of the job if nothing follows it. It is printed at once if the rank says more after a
moment, and in any case after some seconds, which Python may need to end on a busy machine.
"""

from __future__ import annotations

import re
import time

from roundelay.launch._output import RankOutput, Screen

BEGINS = (b"Traceback (most recent call last):", b"  + Exception Group Traceback")
HELD_S = 5.0  # a traceback, while its rank is silent
ONE_BREATH_S = 1.0  # what is said so soon after a traceback belongs to it
MOST_LINES = 10_000
NAME = re.compile(rb"^(?:[\w.]*\.)?(\w+)(?::|$)")


class ErrorStream(RankOutput):
    """The standard error of one rank; `traceback` is the traceback that it ended with."""

    def __init__(self, rank: int, screen: Screen) -> None:
        super().__init__(rank, screen)
        self._theirs = b"[rank%d]:" % rank  # what torch puts before tracebacks, as we do
        self.traceback: list[bytes] = []
        self._held_since: float | None = None

    def line(self, text: bytes) -> None:
        """Hold the line back if it belongs to a traceback that may be the last."""
        if text.startswith(self._theirs):
            text = text[len(self._theirs) :].removeprefix(b" ")
        if self._held_since is not None and time.monotonic() > self._held_since + ONE_BREATH_S:
            self.release()
        if self._held_since is None:
            self.traceback = []  # the rank went on after what was printed
            if not text.startswith(BEGINS):
                super().line(text)
                return
            self._held_since = time.monotonic()
        self.traceback.append(text)
        if len(self.traceback) > MOST_LINES:
            self.release()

    def due(self) -> float | None:
        """Return when something should be shown though no more has come."""
        return super().due() if self._held_since is None else self._held_since + HELD_S

    def show_rest(self) -> None:
        """Show what has waited long enough: the rank lives on."""
        if self._held_since is None:
            super().show_rest()
        else:
            self.release()

    def release(self) -> None:
        """Print what is held back; it stays the last words until more comes."""
        if self._held_since is not None:
            self._held_since = None
            for line in self.traceback:
                super().line(line)

    def error_name(self) -> str:
        """Return the name of the exception that the rank ended by, of a chain the last; or none."""
        name, inside = "", False
        for line in self.traceback:
            if line.startswith(BEGINS):
                inside = True
            elif inside and line[:1] not in (b" ", b""):
                match = NAME.match(line)
                name, inside = match[1].decode() if match else name, False
        return name
