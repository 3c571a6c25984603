"""The calls of one rank in the order they were made: at once, or on a thread of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from roundelay import _core
from roundelay.errors import InvalidArgumentError

__all__ = ["CallQueue", "QueuedCall"]


class QueuedCall:
    """A call that stands in the queue."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._from = _core.caller()  # told in errors: the user's line, not the thread's
        self._over = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._over.is_set()

    def settle(self) -> None:
        """Return when the call is over, however it went."""
        self._over.wait()

    def wait(self) -> None:
        """Return when the call is over, or raise what went wrong."""
        self.settle()
        if self._error is not None:
            raise self._error

    def take(self) -> None:
        """Make the call, on whichever thread this is."""
        _core.work_for(self._from)
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        finally:
            _core.work_for(None)
            self._over.set()


class CallQueue:
    """Calls one after the other; while nothing was started they run at once, with no thread.

    >>> queue, said = CallQueue(), []
    >>> first = queue.start(lambda: said.append("first"))
    >>> queue.run(lambda: said.append("second"))
    >>> said, first.done()
    (['first', 'second'], True)
    """

    def __init__(self) -> None:
        self._waiting: deque[QueuedCall] = deque()
        self._lock = threading.Lock()
        self._inside: tuple[int, str] | None = None  # the thread that makes a call, and which
        self.busy = False

    def run(self, work: Callable[[], None], what: str = "close") -> None:
        """Make the call after all that were started before, and return when it is over."""
        if self._inside is not None and self._inside[0] == threading.get_ident():
            raise InvalidArgumentError(
                f"{what} was called in the middle of {self._inside[1]}, on the same thread, and "
                f"could not return before it: by a signal handler or a finalizer. Let it make a "
                f"note, and communicate when the other call has returned."
            )
        with self._lock:
            alone = not self.busy
            self.busy = True
        if not alone:
            self.start(work).wait()
            return
        self._inside = threading.get_ident(), what
        try:
            work()
        finally:
            self._inside = None
            with self._lock:
                self.busy = bool(self._waiting)
                if self.busy:
                    self._serve_on_a_thread()

    def start(self, work: Callable[[], None]) -> QueuedCall:
        """Stand in the queue, and return at once."""
        queued = QueuedCall(work)
        with self._lock:
            self._waiting.append(queued)
            if not self.busy:
                self.busy = True
                self._serve_on_a_thread()
        return queued

    def _serve_on_a_thread(self) -> None:
        # It ends when the queue is empty, so a rank that rests holds no thread.
        threading.Thread(target=self._serve, name="roundelay-queue", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self.busy = False
                    return
                queued = self._waiting.popleft()
            queued.take()
