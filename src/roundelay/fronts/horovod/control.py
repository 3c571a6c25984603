"""The numbers that ranks and the coordinator, rank 0, send one another: many in one message."""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

import numpy as np

from roundelay.communicator import Communicator
from roundelay.engines import MessageCall
from roundelay.errors import CommunicationError

__all__ = ["QUIET", "Control", "CoordinatorMessage", "RankMessage"]

SAID, DECIDED, TEXT = 1, 2, 3  # tags
MOST = 16  # entries of a message; all messages of a tag have the same length
QUIET = 1e8  # seconds: who waits for work waits for ever, and is not surprised


class RankMessage(NamedTuple):
    """What a rank tells the coordinator, in numbers."""

    rank: int
    said: int
    process_set: int = 0
    name: int = 0
    terms: int = 0
    kind: int = 0
    line: int = 0  # stands for the user's line, where the operation has no name; else 0
    called: int = 0  # stands for the name that the user gave it, whatever the kind; else 0


class CoordinatorMessage(NamedTuple):
    """What the coordinator tells a rank."""

    outcome: int
    process_set: int = 0
    name: int = 0
    argument: int = 0
    text: str = ""  # of which only the length is a number: it follows in a message of its own


class Page:
    """A message of up to so many rows of numbers, to be sent or filled again and again."""

    def __init__(self, width: int) -> None:
        self.data = np.zeros(1 + MOST * width, np.int64)
        self._view = memoryview(self.data)  # type: ignore[arg-type] # mypy knows no arrays
        self._width = width

    def write(self, rows: Sequence[Sequence[int]]) -> None:
        """Put rows in."""
        numbers = chain.from_iterable(rows)
        struct.pack_into(f"{1 + len(rows) * self._width}q", self._view, 0, len(rows), *numbers)

    def rows(self) -> list[list[int]]:
        """Return the rows that came."""
        view, width = self._view, self._width
        return [view[at : at + width].tolist() for at in range(1, 1 + view[0] * width, width)]


class Control:
    """One rank's end of it. Anybody may `say`; only one at a time may listen."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._first = comm, comm.rank == 0
        self._queue: deque[RankMessage] = deque()
        self._sending = threading.RLock()  # a signal handler may come in here, on the same thread
        self._at_it = False  # this thread has that lock, further down
        self._nudges = 0  # messages of rank 0 to itself, under way
        self._listening = False  # somebody waits for a message, and for nothing else
        said, told = len(RankMessage._fields), len(CoordinatorMessage._fields)
        self._out, self._in = Page(said), Page(said if self._first else told)
        self._decided = Page(told)
        self._written: Sequence[CoordinatorMessage] = ()  # there
        src, tag = (None, SAID) if self._first else (0, DECIDED)
        self._send_said = self._repeated(self._out, 0, SAID, sends=True)
        self._receive = self._repeated(self._in, src, tag, sends=False)
        self._send_decided = [
            self._repeated(self._decided, rank, DECIDED, sends=True) for rank in range(comm.size)
        ]
        comm.timeout = self._patience = QUIET
        comm._engine.tells_slow = False  # noqa: SLF001 - who waits here for whom, rank 0 knows

    def _repeated(
        self, page: Page, other: int | None, tag: int, *, sends: bool
    ) -> Callable[[], None]:
        engine = self._comm._engine  # noqa: SLF001 - our own; a call there costs half as much
        return engine.repeated(
            MessageCall(page.data, "int64", other, tag, sends=sends, background=False)
        )

    def say(self, entry: RankMessage) -> None:
        """Tell the coordinator something: soon, or at once if somebody listens already."""
        self._queue.append(entry)  # first: who begins to listen looks here after saying so
        if self._listening:
            self.flush()

    def flush(self) -> bool:
        """Send what was said. Rank 0 tells itself by a queue; who listens there is woken up.

        False in a signal handler or a finalizer that has interrupted this: it goes on afterwards.
        """
        with self._sending:
            if self._at_it:
                return False
            self._at_it = True
            try:
                self._send()
            finally:
                self._at_it = False
        return True

    def _send(self) -> None:
        if self._first:
            if self._listening and self._queue and not self._nudges:
                self._out.write([])
                self._nudges += 1
                self._send_said()
            return
        while self._queue:
            self._out.write(self._taken())
            self._send_said()

    def hear(self, patience: float) -> list[RankMessage]:
        """Return what ranks have said, once one of them has said anything. On rank 0."""
        self._listening = True
        try:
            if self._queue:
                return self._taken()
            rows = self._received(patience)
        finally:
            self._listening = False
        if not rows:
            self._nudges -= 1
        return [RankMessage(*row) for row in rows]

    def listen(self, patience: float) -> list[CoordinatorMessage]:
        """Return what the coordinator has decided, once it has. On other ranks."""
        self._listening = True
        try:
            if self._queue:
                self.flush()
            rows = self._received(patience)
        finally:
            self._listening = False
        return [CoordinatorMessage(a, b, c, d, self._text(length)) for a, b, c, d, length in rows]

    def tell(self, rank: int, decided: Sequence[CoordinatorMessage]) -> None:
        """Tell a rank what was decided, in this order."""
        for start in range(0, len(decided), MOST):
            some = decided[start : start + MOST]
            if some != self._written:  # most is told to all ranks alike
                self._written = some
                self._decided.write([(a, b, c, d, len(text.encode())) for a, b, c, d, text in some])
            self._send_decided[rank]()
            for text in [told.text for told in some if told.text]:
                self._comm.send(np.frombuffer(text.encode(), np.uint8), rank, TEXT)

    def close(self) -> None:
        """Say nothing more, and leave no message to oneself behind."""
        with suppress(CommunicationError):
            while self._nudges > 0:
                self._received(QUIET)
                self._nudges -= 1
        self._comm.close()

    def _taken(self) -> list[RankMessage]:
        return [self._queue.popleft() for _ in range(min(MOST, len(self._queue)))]

    def _received(self, patience: float) -> list[list[int]]:
        if patience != self._patience:
            self._comm.timeout = self._patience = patience
        self._receive()
        return self._in.rows()

    def _text(self, length: int) -> str:
        if not length:
            return ""
        return self._comm.recv(np.empty(length, np.uint8), 0, TEXT).tobytes().decode()
