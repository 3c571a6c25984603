"""The whole terminal, taken for as long as something is looked at, and given back as it was."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from rich.console import Console

from roundelay.signals import before_ending, signals_to_wait_on

TAKE_SCREEN, GIVE_SCREEN_BACK = b"\x1b[?1049h\x1b[H\x1b[?25l", b"\x1b[?25h\x1b[?1049l"


def place_lines(console: Console, lines: Sequence[str]) -> None:
    """Write lines from the top of the screen."""
    # Every line is placed by itself: a new line does not return the carriage in all modes.
    console.file.write("".join(f"\x1b[{row};1H{line}\x1b[K" for row, line in enumerate(lines, 1)))
    console.file.flush()


@contextmanager
def screen(console: Console) -> Iterator[None]:
    """Take the whole terminal, which neither echoes nor waits for Return; give it back always."""
    key_by_key, line_by_line = _key_modes()
    where = console.file.fileno()

    def enter() -> None:
        key_by_key()
        os.write(where, TAKE_SCREEN)

    def leave() -> None:
        os.write(where, GIVE_SCREEN_BACK)
        line_by_line()

    console.file.flush()
    with before_ending(leave, enter):
        enter()
        try:
            yield
        finally:
            with suppress(OSError):  # the terminal may have gone
                leave()


def _key_modes() -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what lets keys come one by one without an echo, and what undoes that."""
    try:
        import termios  # noqa: PLC0415 - Unix only
        import tty  # noqa: PLC0415
    except ImportError:
        return lambda: None, lambda: None
    source = sys.stdin.fileno()
    before = termios.tcgetattr(source)

    def undo() -> None:
        with suppress(termios.error):  # the terminal may have gone
            termios.tcsetattr(source, termios.TCSANOW, before)

    # click.getchar drops what is typed between two calls; holding an arrow key would stutter.
    return lambda: tty.setcbreak(source, termios.TCSANOW), undo


def resizes() -> AbstractContextManager[int | None]:
    """Give what can be read whenever the window gets another size; None where nobody tells."""
    if not hasattr(signal, "SIGWINCH"):
        return nullcontext()
    return signals_to_wait_on([signal.SIGWINCH])


def split_keys(typed: str) -> list[str]:
    r"""Cut what arrived at once into keys; an arrow is several characters.

    >>> split_keys("\x1b[C\x1b[Dq")
    ['\x1b[C', '\x1b[D', 'q']
    """
    return re.findall(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", typed, flags=re.DOTALL)
