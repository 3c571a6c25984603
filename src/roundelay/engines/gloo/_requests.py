"""Messages of a process group under way: announced, asked for, or on their way out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

from roundelay.engines._call import Status, tag_fits
from roundelay.errors import CollectiveTimeout, CommunicationError
from roundelay.reductions import Array

EVER = timedelta(days=3650)


class Arrived:
    """A message that was announced; its content comes when somebody fetches it."""

    def __init__(
        self, src: int, tag: int, nbytes: int, dtype: str, content: Array | None, number: int = 0
    ) -> None:
        self.src, self.tag, self.nbytes, self.dtype = src, tag, nbytes, dtype
        self.content, self.number = content, number
        self.fetching = threading.Lock()


class Waits(Protocol):
    def wait_for(self, receipt: GlooReceipt, limit: float) -> None: ...


class GlooReceipt:
    """A message that somebody waits for."""

    def __init__(self, messages: Waits, data: Array, src: int | None, tag: int | None) -> None:
        self._messages, self.data, self.src, self._tag = messages, data, src, tag
        self._arrived: Arrived | None = None
        self._settled = False
        self.error: RuntimeError | CommunicationError | None = None

    def fits(self, arrived: Arrived) -> bool:
        """Tell whether this is the message that was asked for."""
        return self.src in (None, arrived.src) and tag_fits(self._tag, arrived.tag)

    def finish(
        self, arrived: Arrived | None, error: RuntimeError | CommunicationError | None
    ) -> None:
        """Note what came, or why nothing will."""
        self._arrived, self.error, self._settled = arrived, error, True

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._settled

    def wait(self, limit: float) -> None:
        """Return when the message is there."""
        self._messages.wait_for(self, limit)

    def status(self) -> Status:
        """Say who sent what has come."""
        if self._arrived is None:
            return -1, -1, 0, "uint8"
        return self._arrived.src, self._arrived.tag, self._arrived.nbytes, self._arrived.dtype


class GlooSend:
    """A message on its way out, and the memory that it needs; without works it is out."""

    def __init__(
        self, dst: int, works: list[Any], tensors: list[Any], then: Callable[[], None] | None = None
    ) -> None:
        self._dst, self._works, self._tensors, self._then = dst, works, tensors, then
        self._over = threading.Event()
        self._error: RuntimeError | None = None
        if not works:
            self._over.set()

    def go(self) -> threading.Thread:
        """See to it on a thread: torch tells that a message is out only to who waits for it."""
        thread = threading.Thread(target=self._finish, name="roundelay-send", daemon=True)
        thread.start()
        return thread

    def _finish(self) -> None:
        try:
            for work in self._works:
                work.wait(EVER)  # whoever is in a hurry waits for us
        except RuntimeError as error:
            self._error = error
        self._works, self._tensors = [], []
        self._over.set()
        if self._then is not None:
            self._then()

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._over.is_set()

    def wait(self, limit: float) -> None:
        """Return when the memory may be used again."""
        if not self._over.wait(limit):
            raise CollectiveTimeout(
                f"A message to rank {self._dst} was not taken there within {limit:g} s."
            )
        if self._error is not None:
            raise self._error

    def status(self) -> Status:
        """Say nothing: this was sent, not received."""
        return -1, -1, 0, "uint8"


class GlooMessageRequest:
    """A message of the user's; while it is waited for, the others are watched."""

    def __init__(
        self,
        message: GlooReceipt | GlooSend,
        limit: Callable[[], float],
        watched: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._message, self._limit, self._watched = message, limit, watched
        self.done, self.status = message.done, message.status

    def wait(self) -> None:
        """Return when it is done, or raise what went wrong."""
        with self._watched():
            self._message.wait(self._limit())


class SlotRequest:
    """A message of a walked schedule, and the memory that it needs."""

    def __init__(self, work: Any, tensor: Any) -> None:
        self._work, self._tensor = work, tensor

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Return when it is done."""
        self._work.wait()
