"""Calls under way as torch sees them: works to wait for, and futures that complete by themselves.

A work is settled once, by whoever comes first: a thread that waits for it, one that asks whether
it is done, or, if somebody has its future, a thread that does nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from roundelay.errors import CollectiveTimeout

POLL_S = 0.0005
NO_LIMIT = timedelta(0)  # what torch passes for it


class Pending(Protocol):
    """A call of the communicator that was started."""

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""

    def wait(self) -> Any:
        """Return when it is done, or raise what went wrong."""


#: A call that was started, and what brings its result to where the user wants it.
Part = tuple[Pending, Callable[[], object] | None]


class Work(dist.Work):
    """A call of torch's, made of one or several of ours."""

    def __init__(
        self,
        name: str,
        parts: Sequence[Part],
        outputs: Sequence[Tensor] = (),
        *,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self._parts, self.outputs, self._on_error = list(parts), list(outputs), on_error
        self._lock = threading.Lock()
        self._over = False
        self._error: Exception | None = None
        self._source = -1
        self.told = False  # whether somebody who waited has heard what went wrong
        self._begun: Future[None] | None = None  # completes, and with it what users got
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Return True when the result is there; raise what went wrong, on every call."""
        if timeout > NO_LIMIT and not self._over:
            self._await(timeout.total_seconds())
        self._settle()
        if self._error is not None:
            self.told = True
            raise self._error.with_traceback(None)
        return True

    def is_completed(self) -> bool:
        """Tell whether `wait` would return at once."""
        if not self._over and all(part.done() for part, _ in tuple(self._parts)):
            self._settle()
        return self._over

    done = is_completed  # a work can be a part of another

    def is_success(self) -> bool:
        """Tell whether it is done, and well."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return what went wrong, if anything has yet."""
        return self._error

    def synchronize(self) -> None:
        """Return when the result is there."""
        self.wait()

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result."""
        self.wait()
        return self.outputs

    def source_rank(self) -> int:
        """Return who sent what was received, once it has come."""
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> Future[Any]:
        """Return a future of the output tensors; it completes though nobody waits."""
        with self._lock:
            if self._future is None:
                self._begun = Future()
                # An error that a callback raises is one for torch's C++ too, unlike set_exception.
                self._future = self._begun.then(self._value)
                over = self._over
                if not over:
                    _settlers.take(self._settle)
            else:
                over = False
            begun, future = self._begun, self._future
        if over and begun is not None:
            begun.set_result(None)
        return future

    def _value(self, _: Future[None]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self.outputs

    def _settle(self) -> None:
        """Finish the call, unless another thread has: bring the result, complete the future."""
        if self._over:
            return
        with self._lock:
            if self._over:
                return
            try:
                for part, after in self._parts:
                    part.wait()
                    if after is not None:
                        after()
                    self._source = getattr(part, "source", self._source)
            except Exception as error:  # noqa: BLE001 - raised by every wait, and in the future
                if self._on_error is not None:
                    self._on_error(error)
                self._error = error
            self._parts.clear()
            self._over = True
            begun = self._begun
        if begun is not None:  # outside: callbacks may ask this work for anything
            begun.set_result(None)

    def _await(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not all(part.done() for part, _ in tuple(self._parts)):
            if time.monotonic() > limit:
                raise CollectiveTimeout(
                    f"{self.name} was not done after the {seconds:g} s that wait was given. It is "
                    f"still under way: wait again, or give the group more time."
                )
            time.sleep(POLL_S)


class Done(Work):
    """A call that was over when it returned."""

    def __init__(self, outputs: Sequence[Tensor] = ()) -> None:
        super().__init__("", (), outputs)
        self._over = True

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:  # noqa: ARG002 - nothing to wait for
        """Return True."""
        return True


#: For calls whose caller waits at once and asks for no more.
DONE = Done()


class _Settlers:
    """Threads that wait for works whose future somebody has; as many as there are such works.

    A callback may wait for another work, so no work waits for a thread that is busy.
    """

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._idle = self._made = 0
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def take(self, settle: Callable[[], None]) -> None:
        with self._news:
            if self._idle:
                self._idle -= 1
            else:
                self._made += 1
                threading.Thread(target=self._serve, name="roundelay-futures", daemon=True).start()
        self._queue.put(settle)

    def rest(self, seconds: float) -> None:
        """Return when all of them are idle, or after so long."""
        with self._news:
            self._news.wait_for(lambda: self._idle == self._made, seconds)

    def _serve(self) -> None:
        while True:
            self._queue.get()()
            with self._news:
                self._idle += 1
                self._news.notify_all()


_settlers = _Settlers()


def let_futures_complete(seconds: float = 10.0) -> None:
    """Return when no thread of ours completes a future, and with it runs callbacks, any more.

    One that is still in torch's C++ when the interpreter ends takes the process down with it.
    """
    _settlers.rest(seconds)
