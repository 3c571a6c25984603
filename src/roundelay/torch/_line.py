"""Calls that take several steps, in the background and still in order.

Most calls are one call of the communicator, whose own thread runs them in order. Those that must
first ask the other ranks something, such as how much they will send, stand in this line; whatever
is called after them on the same group stands behind.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from roundelay import _core

__all__ = ["Line"]


class _Place:
    """One call in the line."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self._from = _core.caller()  # told in errors: the user's line, not the thread's
        self._over = threading.Event()
        self._error: Exception | None = None

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error

    def go(self) -> None:
        _core.work_for(self._from)
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        finally:
            _core.work_for(None)
            self._over.set()


class Line:
    """The line of one group; empty and without a thread for most of them."""

    def __init__(self) -> None:
        self._waiting: deque[_Place] = deque()
        self._lock = threading.Lock()
        self.busy = False

    def join(self, run: Callable[[], object]) -> _Place:
        """Stand behind all others; `run` is called from another thread."""
        place = _Place(run)
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
                last._over.wait()  # noqa: SLF001 - its own kind; errors are not for us

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self.busy = False
                    return
                first = self._waiting[0]
            first.go()
            with self._lock:
                self._waiting.popleft()
