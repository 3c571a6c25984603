"""A two-way line between a process and its forked child: whole messages, or the end."""

from __future__ import annotations

import os
import socket
import struct
import weakref

__all__ = ["Channel"]

LENGTH = struct.Struct("<Q")
PIECE = 1 << 20


class Channel:
    """One end of a socket pair that carries messages of any length.

    >>> mine, theirs = Channel.pair()
    >>> mine.send(b"hello")
    True
    >>> theirs.receive()
    b'hello'
    >>> mine.close()
    >>> theirs.receive() is None
    True
    >>> theirs.close()
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return the parent's end and the child's."""
        mine, theirs = socket.socketpair()
        parent = cls(mine)
        _parents.add(parent)
        return parent, cls(theirs)

    def fileno(self) -> int:
        """Return the descriptor, to be waited for."""
        return self._socket.fileno()

    def send(self, message: bytes) -> bool:
        """Send a message; False when nobody is there to read it."""
        try:
            self._socket.sendall(LENGTH.pack(len(message)))
            self._socket.sendall(message)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> bytes | None:
        """Wait for a message; None when the other end is closed, even in the middle of one."""
        head = self._exactly(LENGTH.size)
        return None if head is None else self._exactly(LENGTH.unpack(head)[0])

    def _exactly(self, length: int) -> bytes | None:
        taken = bytearray()
        while len(taken) < length:
            try:
                piece = self._socket.recv(min(length - len(taken), PIECE))
            except ConnectionResetError:
                return None
            if not piece:
                return None
            taken += piece
        return bytes(taken)

    def close(self) -> None:
        """Let go of this end."""
        self._socket.close()


_parents: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_in_child() -> None:
    # A child waits for the end of its parent; a brother that held a copy would hide it.
    for channel in list(_parents):
        channel.close()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_close_in_child)
