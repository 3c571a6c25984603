"""What ranks say to one another while they meet: fixed structs, short, with descriptors beside."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from roundelay.errors import RendezvousError

#: To rank 0: I am here; I am in the world. From rank 0: these are missing; here are descriptors;
#: here are the last and the token; all are in; you can't take part, and why.
HELLO, ENTERED, WAITING, PART, WORLD, GO, REFUSED = range(1, 8)

HEAD = struct.Struct("<8sHH")
MAGIC, VERSION = b"roundely", 1
MOST_BYTES = 2048  # of a body
MOST_DESCRIPTORS = 250  # of one message; the kernel takes 253
HELLO_BODY = struct.Struct("<II32s")
INT = struct.calcsize("i")


class Hello(NamedTuple):
    """Who comes, to a job of how many, with which version of the native core."""

    rank: int
    size: int
    core: str

    def pack(self) -> bytes:
        """Return the struct."""
        return HELLO_BODY.pack(self.rank, self.size, self.core.encode()[:32])

    @classmethod
    def unpack(cls, body: bytes) -> Hello:
        """Read the struct; raises `struct.error` for one of another length."""
        rank, size, core = HELLO_BODY.unpack(body)
        return cls(rank, size, core.rstrip(b"\0").decode(errors="replace"))


def send(
    connection: socket.socket, kind: int, body: bytes = b"", descriptors: Sequence[int] = ()
) -> None:
    """Send one message, or raise `OSError`; a reader that does not read is one that is gone."""
    rights = array.array("i", descriptors)
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
    connection.sendmsg(
        [HEAD.pack(MAGIC, VERSION, kind), body[:MOST_BYTES]], beside, socket.MSG_NOSIGNAL
    )


def receive(connection: socket.socket, deadline: float, taken: list[int]) -> tuple[int, bytes]:
    """Return the kind and the body of the next message; what came beside it goes to `taken`.

    Raises `TimeoutError` at the deadline, `EOFError` at the end, `RendezvousError` for nonsense,
    and `OSError` where this process may open no more files.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)
    space = socket.CMSG_SPACE(MOST_DESCRIPTORS * INT)
    try:
        data, beside, flags, _ = connection.recvmsg(
            HEAD.size + MOST_BYTES, space, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        raise EOFError from None
    for level, kind, rights in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            taken += array.array("i", rights[: len(rights) // INT * INT])
    if not data:
        raise EOFError
    if flags & socket.MSG_CTRUNC:
        # The kernel drops what it can't give: this process has no room for the others' pipes.
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if flags & socket.MSG_TRUNC or len(data) < HEAD.size:
        raise RendezvousError("a message of no known length came")
    magic, version, kind = HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise RendezvousError(
            f"the other process speaks version {version} of the protocol, this one {VERSION}. "
            f"Install one version of roundelay for all ranks."
            if magic == MAGIC
            else "the other process is no rank of roundelay"
        )
    return kind, data[HEAD.size :]


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return pid, uid
