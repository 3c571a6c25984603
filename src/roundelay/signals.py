"""Signals: as something to wait on, and as the moment to give a terminal back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

__all__ = ["before_ending", "signals_to_wait_on"]

#: What ends a command from outside, where the system has it. Ctrl-C is an exception in Python.
ENDING = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
]
STOP = getattr(signal, "SIGTSTP", None)  # Ctrl-Z


@contextlib.contextmanager
def signals_to_wait_on(
    numbers: Iterable[int], note: Callable[[int], object] = lambda _: None
) -> Iterator[int]:
    """Yield a descriptor that can be read when one of these signals has come; `note` is told which.

    A handler that did the work itself might run in the middle of the same work, or, for a signal
    that comes just before a wait, only after it. Signals that are ignored stay so (nohup).
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = {number: signal.getsignal(number) for number in numbers}
    old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda got, _: note(got))
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def before_ending(
    leave: Callable[[], object], enter: Callable[[], object] | None = None
) -> Iterator[None]:
    """Have `leave` called before a signal ends this process; with `enter`, also around a stop.

    The process still ends, or stops, by that very signal, as whoever waits for it expects.
    """

    def give_back(number: int, _: object) -> None:
        with contextlib.suppress(OSError):  # the terminal may be what has gone
            leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # Only after a stop does anything come here.
        signal.signal(number, give_back)
        if enter is not None:
            enter()

    numbers = [*ENDING, *([STOP] if enter is not None and STOP is not None else [])]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # no other thread may take signals
    before = {
        number: signal.signal(number, give_back)
        for number in numbers
        if signal.getsignal(number) is signal.SIG_DFL
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
