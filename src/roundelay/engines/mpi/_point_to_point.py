"""Messages between users' ranks over MPI: matched here, so that any tag will do.

MPI's own tags may end at 32767, and MPI does not tell which dtype came. So a message is a head that
says what follows, with the data behind it if that is short, and otherwise the data as a message of
its own under a number from the head. Heads are matched with receives in the order they come.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from roundelay.engines._call import MessageCall, Status, tag_fits
from roundelay.engines.mpi._progress import Requests
from roundelay.reductions import CODES, DTYPES, Array

HEAD_TAG, WALK_TAG = 0, 1
FIRST_DATA_TAG = 2
HEAD = struct.Struct("<qqiB")  # the user's tag, bytes, the number of the data, dtype
INLINE = 4096  # bytes that go with the head


@dataclass(frozen=True, slots=True)
class MessageHead:
    """What has been announced by a rank."""

    source: int
    tag: int
    nbytes: int
    number: int
    dtype: str
    inline: bytes


class MpiMessage:
    """A message under way: sent, or expected; `status` says between whom, and what."""

    def __init__(self) -> None:
        self.over = False
        self.status: Status | None = None
        self._requests: Requests | None = None

    def begun(self, requests: Requests, status: Status) -> None:
        """Say what MPI is asked to do."""
        self._requests, self.status = requests, status

    def look(self) -> bool:
        """Ask MPI whether it is over."""
        self.over = self._requests is not None and self._requests.done()
        return self.over


class MpiReceipt(MpiMessage):
    """A message that is expected."""

    def __init__(self, data: Array, dtype: str, source: int | None, tag: int | None) -> None:
        super().__init__()
        self.data, self.dtype, self.source, self.tag = data, dtype, source, tag

    def wants(self, head: MessageHead) -> bool:
        """Tell whether this is what was waited for."""
        return self.source in (None, head.source) and tag_fits(self.tag, head.tag)


class MpiPointToPoint:
    """The messages of one rank on one MPI communicator."""

    def __init__(
        self, mpi: Any, comm: Any, most: int, on_error: Callable[[Exception, str], None]
    ) -> None:  # without types, see load_mpi
        self._mpi, self._comm, self._most, self._on_error = mpi, comm, most, on_error
        self._numbers = int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)) - FIRST_DATA_TAG
        self._sent = 0
        self._going: list[MpiMessage] = []
        self._posted: list[MpiReceipt] = []  # nothing has come for them yet
        self._coming: list[MpiReceipt] = []
        self._unclaimed: list[MessageHead] = []  # nobody has asked for them yet
        self._abandoned: list[MpiMessage] = []  # MPI may still need their memory

    def post(self, message: MessageCall) -> MpiMessage:
        """Send a message, a copy if the caller will not wait, or expect one."""
        data, dtype, other, tag = message.data, message.dtype, message.other, message.tag
        if not message.sends:
            return self.receive(MpiReceipt(data, dtype, other, tag))
        return self.send(data if message.background else data.copy(), dtype, other or 0, tag or 0)

    def send(self, data: Array, dtype: str, dst: int, tag: int) -> MpiMessage:
        """Begin to send; the data must stay as it is until that is over."""
        raw = data.view(np.uint8)
        number = FIRST_DATA_TAG + self._sent % self._numbers
        head = HEAD.pack(tag, raw.nbytes, number, CODES[dtype])
        parts = [(np.frombuffer(head, np.uint8), HEAD_TAG)]
        if raw.nbytes <= INLINE:
            parts = [(np.frombuffer(head + raw.tobytes(), np.uint8), HEAD_TAG)]
        else:
            self._sent += 1
            parts += [(piece, number) for piece in pieces(raw, self._most)]
        begun = [self._comm.Isend([part, self._mpi.BYTE], dst, mark) for part, mark in parts]
        message = MpiMessage()
        message.begun(Requests(begun, parts), (dst, tag, raw.nbytes, dtype))
        self._going.append(message)
        return message

    def receive(self, receipt: MpiReceipt) -> MpiReceipt:
        """Take the first unclaimed message that fits, or wait for one."""
        for at, head in enumerate(self._unclaimed):
            if receipt.wants(head):
                del self._unclaimed[at]
                self._take(receipt, head)
                break
        else:
            self._posted.append(receipt)
        return receipt

    def abandon(self) -> None:
        """Go on with nothing more."""
        self._abandoned += [*self._going, *self._coming]
        for messages in (self._going, self._posted, self._coming):
            messages.clear()

    def poll(self) -> bool:
        """Match what has come, and let go of what is done."""
        before = self._under_way()
        try:
            self._match()
            self._going = [message for message in self._going if not message.look()]
            self._coming = [receipt for receipt in self._coming if not receipt.look()]
        except self._mpi.Exception as error:
            self._on_error(error, "a message")
            return True
        return self._under_way() < before

    def _under_way(self) -> int:
        return len(self._going) + len(self._posted) + len(self._coming)

    def _match(self) -> None:
        while self._posted:
            head = self._next_head()
            if head is None:
                return
            wanting = next((receipt for receipt in self._posted if receipt.wants(head)), None)
            if wanting is None:
                self._unclaimed.append(head)
            else:
                self._posted.remove(wanting)
                self._take(wanting, head)

    def idle(self) -> bool:
        """Tell whether nothing is under way."""
        return self._under_way() == 0

    def going(self) -> bool:
        """Tell whether MPI still needs data that was sent."""
        return bool(self._going)

    def _next_head(self) -> MessageHead | None:
        status = self._mpi.Status()
        message = self._comm.Improbe(self._mpi.ANY_SOURCE, HEAD_TAG, status)
        if message is None:
            return None
        raw = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv([raw, self._mpi.BYTE])
        tag, nbytes, number, code = HEAD.unpack_from(raw)
        return MessageHead(
            status.Get_source(), tag, nbytes, number, DTYPES[code], bytes(raw[HEAD.size :])
        )

    def _take(self, receipt: MpiReceipt, head: MessageHead) -> None:
        """Receive what was announced, into the user's memory if it is what that is for."""
        raw = receipt.data.view(np.uint8)
        if head.nbytes != raw.nbytes or head.dtype != receipt.dtype:
            raw = np.empty(head.nbytes, np.uint8)  # taken and dropped
        begun = []
        if head.nbytes <= INLINE:
            raw[:] = np.frombuffer(head.inline, np.uint8)
        else:
            begun = [
                self._comm.Irecv([piece, self._mpi.BYTE], head.source, head.number)
                for piece in pieces(raw, self._most)
            ]
        status = head.source, head.tag, head.nbytes, head.dtype
        receipt.begun(Requests(begun, raw), status)
        self._coming.append(receipt)


def pieces(raw: Array, most: int) -> Iterator[Array]:
    """Cut bytes into pieces that MPI can count.

    >>> [len(piece) for piece in pieces(np.zeros(10, np.uint8), 4)]
    [4, 4, 2]
    """
    return (raw[start : start + most] for start in range(0, len(raw), most))
