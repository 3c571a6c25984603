"""Signals: as something to wait on, as the moment to give a terminal back, and for process 1."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

__all__ = ["before_ending", "do_the_work_of_init", "signals_to_wait_on"]

#: What ends a command from outside, where the system has it. Ctrl-C is an exception in Python.
ENDING = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
]
STOP = getattr(signal, "SIGTSTP", None)  # Ctrl-Z


def do_the_work_of_init() -> None:
    """Go on in a child, and never return here, if this is process 1, as in most containers.

    For signals to process 1 the kernel has no default action: a SIGTERM that finds no handler is
    lost. And all orphans become its children, which stay zombies until it waits for them. So here
    signals are passed on, every child is waited for, and the end is that of the first.
    """
    if os.getpid() != 1:
        return
    passed = [signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, *ENDING]
    heard = {*passed, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        came = signal.sigwaitinfo(heard)
        if came.si_signo == signal.SIGCHLD:
            _reap(child)
        elif came.si_code <= 0:  # from a process; what a terminal sends, the child has got too
            os.kill(child, came.si_signo)


def _reap(first: int) -> None:
    """Wait for all children that have ended; end as the first one did, if it is among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == first:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        if pid == 0:
            return


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
