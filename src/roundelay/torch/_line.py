"""Calls that take several steps, in the background and still in order.

Most calls are one call of the communicator, whose own thread runs them in order. Those that must
first ask the other ranks something, such as how much they will send, stand in this line; whatever
is called after them on the same group stands behind.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from roundelay.engines._call_queue import Turn

__all__ = ["Line"]


class Line:
    """The line of one group; empty and without a thread for most of them."""

    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()
        self._lock = threading.Lock()
        self.busy = False

    def join(self, run: Callable[[], object]) -> Turn:
        """Stand behind all others; `run` is called from another thread."""
        place = Turn(run)
        with self._lock:
            self._waiting.append(place)
            if not self.busy:
                self.busy = True
                threading.Thread(target=self._serve, name="roundelay-line", daemon=True).start()
        return place

    def clear(self) -> None:
        """Return when nobody stands in the line any more."""
        while self.busy:
            with self._lock:
                last = self._waiting[-1] if self._waiting else None
            if last is not None:
                last.settle()

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self.busy = False
                    return
                first = self._waiting[0]
            first.take()
            with self._lock:
                self._waiting.popleft()
