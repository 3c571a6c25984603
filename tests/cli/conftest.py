"""Runs the command line as a user would, in this process and in a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

from roundelay.cli._group import roundelay

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line; standard output and error are kept apart."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*arguments: str) -> Result:
        result = CliRunner().invoke(roundelay, arguments, prog_name="roundelay")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


class Terminal:
    """A real pseudo-terminal with `roundelay` in it."""

    def __init__(self, *arguments: str, columns: int, lines: int, term: str) -> None:
        self.text = ""
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            # readline sets these behind Python's back, so the environment is given outright.
            kept = {
                k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")
            }
            environment = {**kept, "TERM": term, "PYTHONIOENCODING": "utf-8"}
            time.sleep(0.05)  # until the parent has set the size
            code = "from roundelay.cli import main; main()"
            os.execve(sys.executable, [sys.executable, "-c", code, *arguments], environment)
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def send(self, keys: str) -> None:
        self.text = ""
        os.write(self.master, keys.encode())

    def wait_for(self, wanted: str, *, seconds: float = 30) -> None:
        """Read until the text appears; what came so far is in the message if it does not."""
        end = time.monotonic() + seconds
        while wanted not in self.text:
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            if not ready or not self._read():
                pytest.fail(f"{wanted!r} did not appear in {self.text!r}")

    def exit_code(self) -> int:
        while self._read():
            pass
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return code

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self.master)

    def _read(self) -> bool:
        try:
            data = os.read(self.master, 65536)
        except OSError:  # how Linux says that the other end is closed
            return False
        self.text += data.decode("utf-8", "replace")
        return bool(data)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Start `roundelay` in a terminal; it is closed at the end."""
    started: list[Terminal] = []

    def start(*arguments: str, columns: int = 80, lines: int = 24, term: str = "xterm") -> Terminal:
        started.append(Terminal(*arguments, columns=columns, lines=lines, term=term))
        return started[-1]

    yield start
    for each in started:
        each.close()
