"""A two-way line between a process and its forked child: whole messages, or the end."""

from __future__ import annotations

import os

__all__ = ["Channel"]

LENGTH = 8  # bytes that say it
PIECE = 1 << 20


class Channel:
    """One end of a socket pair, by its descriptor, that carries messages of any length.

    >>> import socket
    >>> mine, theirs = (Channel(end.detach()) for end in socket.socketpair())
    >>> mine.send(b"hello")
    True
    >>> theirs.receive()
    b'hello'
    >>> mine.close()
    >>> theirs.receive() is None
    True
    """

    def __init__(self, line: int) -> None:
        self._line = line

    @classmethod
    def to_child(cls, line: int) -> Channel:
        """Return the parent's end; children that are forked later close it."""
        parent = cls(line)
        _parents.add(parent)
        return parent

    def fileno(self) -> int:
        """Return the descriptor, to be waited for."""
        return self._line

    def send(self, message: bytes) -> bool:
        """Send a message; False when nobody is there to read it."""
        try:
            for part in (len(message).to_bytes(LENGTH, "little"), message):
                left = memoryview(part)
                while left:
                    left = left[os.write(self._line, left) :]
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> bytes | None:
        """Wait for a message; None when the other end is closed, even in the middle of one."""
        head = self._exactly(LENGTH)
        return None if head is None else self._exactly(int.from_bytes(head, "little"))

    def _exactly(self, length: int) -> bytes | None:
        taken = bytearray()
        while len(taken) < length:
            try:
                piece = os.read(self._line, min(length - len(taken), PIECE))
            except ConnectionResetError:
                return None
            if not piece:
                return None
            taken += piece
        return bytes(taken)

    def close(self) -> None:
        """Let go of this end."""
        if self._line >= 0:
            os.close(self._line)
            self._line = -1
            _parents.discard(self)

    __del__ = close


_parents: set[Channel] = set()  # that are open


def _close_in_child() -> None:
    # A child waits for the end of its parent; a brother that held a copy would hide it.
    for channel in tuple(_parents):
        channel.close()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_close_in_child)
