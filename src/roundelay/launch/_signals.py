"""Signals as something to wait on, beside output, keys and ends of processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator

__all__ = ["signals_to_wait_on"]


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
