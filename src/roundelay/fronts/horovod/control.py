"""The numbers that ranks and the coordinator, rank 0, send one another: many in one message."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from roundelay.communicator import ANY, Communicator

__all__ = ["QUIET", "Control", "Entry", "Told"]

SAID, DECIDED, TEXT = 1, 2, 3  # tags
MOST = 16  # entries of a message; all messages have the same length
QUIET = 1e8  # seconds: who waits for work waits for ever, and is not surprised


class Entry(NamedTuple):
    """What a rank tells the coordinator, in numbers."""

    rank: int
    said: int
    process_set: int = 0
    name: int = 0
    terms: int = 0
    kind: int = 0
    line: int = 0  # stands for the user's line, where the operation has no name; else 0
    family: int = 0  # of operations that may run in one call with those of their kind; 0 is none
    nbytes: int = 0


class Told(NamedTuple):
    """What the coordinator tells a rank."""

    outcome: int
    process_set: int
    name: int
    argument: int
    more: int  # whether the next one runs in the same call
    length: int  # of the text, which follows in a message of its own
    text: str = ""


class Control:
    """One rank's end of it. Anybody may `say`; only one at a time may listen."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._first = comm, comm.rank == 0
        self._queue: deque[Entry] = deque()
        self._sending = threading.Lock()
        self._listening = False  # somebody waits for a message, and for nothing else
        self._out = np.zeros((1 + MOST, len(Entry._fields)), np.int64)
        heard = self._out if self._first else np.zeros((1 + MOST, 6), np.int64)
        self._in = np.zeros_like(heard)
        comm.timeout = self._patience = QUIET

    def say(self, entry: Entry) -> None:
        """Tell the coordinator something: soon, or at once if somebody listens already."""
        self._queue.append(entry)  # first: who begins to listen looks here after saying so
        if self._listening:
            self.flush()

    def flush(self) -> None:
        """Send what was said. Rank 0 tells itself by a queue; who listens there is woken up."""
        with self._sending:
            if self._first:
                if self._listening:
                    self._out[0, 0] = 0
                    self._comm.send(self._out, 0, SAID)
                return
            while self._queue:
                self._send(0, SAID, self._out, self._taken())

    def hear(self, patience: float) -> list[Entry]:
        """Return what ranks have said, once one of them has said anything. On rank 0."""
        self._listening = True
        try:
            if self._queue:
                return self._taken()
            rows = self._receive(ANY, SAID, patience)
        finally:
            self._listening = False
        return [Entry(*row) for row in rows]

    def listen(self, patience: float) -> list[Told]:
        """Return what the coordinator has decided, once it has. On other ranks."""
        self._listening = True
        try:
            self.flush()
            rows = self._receive(0, DECIDED, patience)
        finally:
            self._listening = False
        return [Told(*row, self._text(row[-1])) for row in rows]

    def tell(self, rank: int, decided: Sequence[Told]) -> None:
        """Tell a rank what was decided, in this order."""
        out = np.zeros((1 + MOST, 6), np.int64)
        for start in range(0, len(decided), MOST):
            batch = decided[start : start + MOST]
            self._send(rank, DECIDED, out, [told[:6] for told in batch])
            for told in batch:
                if told.length:
                    text = np.frombuffer(told.text.encode(), np.uint8)
                    self._comm.send(text, rank, TEXT)

    def close(self) -> None:
        """Say nothing more."""
        self._comm.close()

    def _taken(self) -> list[Entry]:
        count = min(MOST, len(self._queue))
        return [self._queue.popleft() for _ in range(count)]

    def _send(self, dst: int, tag: int, out: np.ndarray, rows: Iterable[Sequence[int]]) -> None:
        count = 0
        for count, row in enumerate(rows, 1):
            out[count] = row
        out[0, 0] = count
        self._comm.send(out, dst, tag)

    def _receive(self, src: object, tag: int, patience: float) -> list[list[int]]:
        if patience != self._patience:
            self._comm.timeout = self._patience = patience
        self._comm.recv(self._in, src, tag)
        rows: list[list[int]] = self._in[1 : 1 + int(self._in[0, 0])].tolist()
        return rows

    def _text(self, length: int) -> str:
        if not length:
            return ""
        return self._comm.recv(np.empty(length, np.uint8), 0, TEXT).tobytes().decode()
