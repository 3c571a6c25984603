"""What ranks print, line by line, each line with its rank in front; whole lines never mix."""

from __future__ import annotations

import os
import time
from typing import IO

COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # of the terminal's own palette
PATIENCE_S = 0.25  # after which a line without an end is shown as it stands
LONGEST = 1 << 16  # bytes of a line that are held back


class Cursor:
    """Whose unfinished line stands at the end; two outputs on one terminal share it."""

    at: RankOutput | None = None


class Screen:
    """Where lines come out: standard output or standard error of the launcher."""

    def __init__(self, out: IO[bytes], *, size: int, cursor: Cursor | None = None) -> None:
        self._out = out
        self._cursor = cursor or Cursor()
        self._wide = len(str(size - 1))
        self._tty = out.isatty()
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM", "") in ("", "dumb")
        self._colour = self._tty and not plain

    def prefix(self, rank: int) -> bytes:
        """Return what stands in front of a rank's lines."""
        text = f"[{rank}]".rjust(self._wide + 2)
        if self._colour:
            text = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{text}\x1b[0m"
        return text.encode() + b" "

    def line(self, stream: RankOutput, text: bytes) -> None:
        """Write a whole line, or the rest of the one that stands unfinished."""
        self._begin(stream, text)
        self._out.write(text.rsplit(b"\r", 1)[-1] + b"\n")
        self._cursor.at = None

    def piece(self, stream: RankOutput, text: bytes) -> None:
        """Write the beginning of a line whose end has not come; it may be drawn over later."""
        self._begin(stream, text)
        self._out.write(text.rsplit(b"\r", 1)[-1])
        self._out.flush()
        self._cursor.at = stream

    def _begin(self, stream: RankOutput, text: bytes) -> None:
        if self._cursor.at is stream and b"\r" not in text:
            return
        if self._cursor.at is stream and self._tty:
            self._out.write(b"\r\x1b[K")  # a progress bar takes the place of its last state
        elif self._cursor.at is not None:
            self._out.write(b"\n")
        self._out.write(self.prefix(stream.rank))

    def flush(self) -> None:
        """Let it be seen."""
        self._out.flush()


def screens(out: IO[bytes], err: IO[bytes], *, size: int) -> tuple[Screen, Screen]:
    """Return where output and errors come out."""
    shared = Cursor() if out.isatty() and err.isatty() else None
    return Screen(out, size=size, cursor=shared), Screen(err, size=size, cursor=shared)


class RankOutput:
    """What one rank prints to one of its outputs, cut into lines."""

    def __init__(self, rank: int, screen: Screen) -> None:
        self.rank = rank
        self._screen = screen
        self._rest = b""
        self._since: float | None = None  # when the rest began

    def feed(self, data: bytes) -> None:
        """Take what came, and write the lines that are whole."""
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.line(line.removesuffix(b"\r"))
        if lines or not self._rest:
            self._since = time.monotonic()
        self._rest = rest
        if len(rest) > LONGEST:
            self.show_rest()

    def line(self, text: bytes) -> None:
        """Write one line."""
        self._screen.line(self, text)

    def due(self) -> float | None:
        """Return when an unfinished line should be shown; None if there is none."""
        return self._since + PATIENCE_S if self._rest and self._since is not None else None

    def show_rest(self) -> None:
        """Show what has come of an unfinished line."""
        if self._rest:
            self._screen.piece(self, self._rest)
        self._rest, self._since = b"", None

    def close(self) -> None:
        """Finish: a last line without an end is a line too."""
        if self._rest:
            self.line(self._rest)
        self._rest = b""
