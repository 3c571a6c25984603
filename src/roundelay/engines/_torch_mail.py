"""Messages with tags, any source and any tag, over a process group's plain sends and receives.

Torch's own receive must name the tag and the exact length. So every message is announced by a
header that says both; a thread for each rank that somebody wants to hear from takes the headers
and matches them with what was asked for, in the order in which they came.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

from roundelay.engines._native import DTYPES
from roundelay.engines._torch_groups import as_tensor, seconds
from roundelay.errors import CollectiveTimeout, CommunicationError
from roundelay.reductions import Array

__all__ = ["TorchMail"]

#: Slots of the process group: walked schedules use 1, headers 2, the rest is what they announce.
HEADER, CONTENT, NUMBERS = 2, 16, 1 << 30
SMALL = 64 * 1024  # bytes up to which a message is copied, so that its sender need not wait
MOST_UNDER_WAY = 256  # copied messages to one rank
EVER = timedelta(days=3650)


class TorchMail:
    """The messages of one rank of a group."""

    def __init__(
        self,
        torch: Any,
        group: Any,
        rank: int,
        size: int,
        explain: Callable[[BaseException], CommunicationError],
    ) -> None:
        self._torch, self._group, self.rank, self._size = torch, group, rank, size
        self._explain = explain
        self._news = threading.Condition()
        self._wanted: list[Receipt] = []  # in the order in which they were asked for
        self._unasked: list[_Arrived] = []  # in the order in which they came
        self._listeners: dict[int, threading.Thread] = {}
        self._senders: list[threading.Thread] = []
        self._gone: dict[int, CommunicationError] = {}
        self._numbers = [0] * size  # of messages to every rank
        self._under_way: list[deque[tuple[Any, ...]]] = [deque() for _ in range(size)]

    def send(self, data: Array, dtype: str, dst: int, tag: int, *, background: bool) -> Sent:
        """Send bytes; what is small is copied and done at once."""
        if dst == self.rank:
            self._take(_Arrived(dst, tag, data.nbytes, dtype, data.copy()))
            return Sent([], [])
        kept = data.copy() if data.nbytes <= SMALL else data
        header = np.array([tag, data.nbytes, DTYPES.index(dtype), self._numbers[dst]], np.int64)
        slot = CONTENT + self._numbers[dst] % NUMBERS
        self._numbers[dst] += 1
        tensors = [as_tensor(self._torch, header)]
        works = [self._group.send([tensors[0]], dst, HEADER)]
        if data.nbytes:
            tensors.append(as_tensor(self._torch, kept))
            works.append(self._group.send([tensors[1]], dst, slot))
        if data.nbytes <= SMALL:
            self._keep(dst, works, tensors)
            return Sent([], [])
        sent = Sent(works, tensors)
        if background:
            sender = threading.Thread(target=sent.finish, name="roundelay-send", daemon=True)
            self._senders = [one for one in self._senders if one.is_alive()] + [sender]
            sender.start()
        return sent

    def receive(self, data: Array, src: int | None, tag: int | None) -> Receipt:
        """Ask for the next message that fits."""
        receipt = Receipt(self, data, src, tag)
        with self._news:
            found = next((each for each in self._unasked if receipt.fits(each)), None)
            if found is None:
                self._wanted.append(receipt)
            else:
                self._unasked.remove(found)
        if found is not None:
            self._fill(receipt, found)
        else:
            for other in range(self._size) if src is None else (src,):
                self._listen_to(other)
            self._note_gone()
        return receipt

    def close(self, limit: float) -> None:
        """Let what was copied be taken; the others may be closing too, so take what they send."""
        pending = [dst for dst in range(self._size) if self._under_way[dst]]
        if pending:
            for other in range(self._size):
                self._listen_to(other)
        with contextlib.suppress(RuntimeError):  # who is gone takes nothing
            for dst in pending:
                self._wait_for_oldest(dst, 0, limit)

    def hung_up(self) -> None:
        """Wait for the threads; what they waited for has been cut off."""
        for thread in self._threads():
            if thread is not threading.current_thread():
                thread.join()

    @property
    def listens(self) -> bool:
        """Tell whether threads wait for messages."""
        return any(thread.is_alive() for thread in self._threads())

    def _threads(self) -> list[threading.Thread]:
        return [*self._listeners.values(), *self._senders]

    def _keep(self, dst: int, works: list[Any], tensors: list[Any]) -> None:
        self._under_way[dst].append((works, tensors))
        self._wait_for_oldest(dst, MOST_UNDER_WAY, None)

    def _wait_for_oldest(self, dst: int, most: int, limit: float | None) -> None:
        while len(self._under_way[dst]) > most:
            works, _ = self._under_way[dst].popleft()
            for work in works:
                work.wait(*([] if limit is None else [seconds(limit)]))

    def _listen_to(self, src: int) -> None:
        if src == self.rank or src in self._listeners:
            return
        name = f"roundelay-mail-from-{src}"
        listener = threading.Thread(target=self._listen, args=(src,), name=name, daemon=True)
        self._listeners[src] = listener
        listener.start()

    def _listen(self, src: int) -> None:
        header = np.zeros(4, np.int64)
        tensor = as_tensor(self._torch, header)
        try:
            while True:
                self._group.recv([tensor], src, HEADER).wait(EVER)
                tag, nbytes, code, number = header.tolist()
                self._take(_Arrived(src, tag, nbytes, DTYPES[code], None, number))
        except RuntimeError as error:
            with self._news:
                self._gone[src] = self._explain(error)
            self._note_gone()

    def _take(self, arrived: _Arrived) -> None:
        """Match what has come; large messages that nobody asked for stay where they are."""
        with self._news:
            receipt = next((each for each in self._wanted if each.fits(arrived)), None)
            if receipt is not None:
                self._wanted.remove(receipt)
        if receipt is not None:
            self._fill(receipt, arrived)
            return
        if arrived.content is None and arrived.nbytes <= SMALL:
            arrived.content = self._content(arrived, np.empty(arrived.nbytes, np.uint8))
        with self._news:
            # Somebody may have asked for it in the meantime.
            receipt = next((each for each in self._wanted if each.fits(arrived)), None)
            if receipt is None:
                self._unasked.append(arrived)
            else:
                self._wanted.remove(receipt)
        if receipt is not None:
            self._fill(receipt, arrived)

    def _fill(self, receipt: Receipt, arrived: _Arrived) -> None:
        """Bring the content to who asked for it; its sender has begun, so it will come."""
        error = None
        fits = arrived.nbytes == receipt.data.nbytes
        try:
            if arrived.content is None:
                own = receipt.data if fits else np.empty(arrived.nbytes, np.uint8)
                self._content(arrived, own)
            elif fits:
                receipt.data[:] = arrived.content
        except RuntimeError as failed:
            error = self._explain(failed)
        with self._news:
            receipt.finish(arrived, error)
            self._news.notify_all()

    def _content(self, arrived: _Arrived, into: Array) -> Array:
        if arrived.nbytes:
            tensor = as_tensor(self._torch, into)
            self._group.recv([tensor], arrived.src, CONTENT + arrived.number % NUMBERS).wait()
        return into

    def _note_gone(self) -> None:
        """End the wait for ranks that send no more."""
        with self._news:
            everyone = len(self._gone) == self._size - 1 > 0
            for receipt in list(self._wanted):
                error = self._gone.get(-1 if receipt.src is None else receipt.src)
                if receipt.src is None and everyone:
                    error = next(iter(self._gone.values()))
                if error is not None:
                    self._wanted.remove(receipt)
                    receipt.finish(None, error)
            self._news.notify_all()

    def wait_for(self, receipt: Receipt, limit: float) -> None:
        """Wait until a receipt is settled, or raise."""
        with self._news:
            settled = self._news.wait_for(receipt.done, limit)
        if not settled:
            who = "any rank" if receipt.src is None else f"rank {receipt.src}"
            raise CollectiveTimeout(
                f"Rank {self.rank} waited {limit:g} s for a message from {who}, and none came."
            )
        if receipt.error is not None:
            raise receipt.error


class _Arrived:
    """A message that was announced; small ones have come as well."""

    def __init__(
        self, src: int, tag: int, nbytes: int, dtype: str, content: Array | None, number: int = 0
    ) -> None:
        self.src, self.tag, self.nbytes, self.dtype = src, tag, nbytes, dtype
        self.content, self.number = content, number


class Receipt:
    """A message that somebody waits for."""

    def __init__(self, mail: TorchMail, data: Array, src: int | None, tag: int | None) -> None:
        self._mail, self.data, self.src, self._tag = mail, data, src, tag
        self._arrived: _Arrived | None = None
        self._settled = False
        self.error: CommunicationError | None = None

    def fits(self, arrived: _Arrived) -> bool:
        """Tell whether this is the message that was asked for."""
        return self.src in (None, arrived.src) and self._tag in (None, arrived.tag)

    def finish(self, arrived: _Arrived | None, error: CommunicationError | None) -> None:
        """Note what came, or why nothing will."""
        self._arrived, self.error, self._settled = arrived, error, True

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._settled

    def wait(self, limit: float) -> None:
        """Return when the message is there."""
        self._mail.wait_for(self, limit)

    def found(self) -> tuple[int, int, int, str]:
        """Say who sent what has come."""
        if self._arrived is None:
            return -1, -1, 0, "uint8"
        return self._arrived.src, self._arrived.tag, self._arrived.nbytes, self._arrived.dtype


class Sent:
    """A message on its way out, and the memory that it needs."""

    def __init__(self, works: list[Any], tensors: list[Any]) -> None:
        self._works, self._tensors = works, tensors
        self._lock = threading.Lock()
        self._error: RuntimeError | None = None

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return not self._works

    def finish(self) -> None:
        """Wait, and keep what goes wrong; torch lets only one thread wait for a message."""
        with self._lock:
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                self._error = error
            self._works, self._tensors = [], []

    def wait(self, limit: float) -> None:
        """Return when the memory may be used again."""
        del limit  # the group's own
        self.finish()
        if self._error is not None:
            raise self._error

    def found(self) -> tuple[int, int, int, str]:
        """Say nothing: this was sent, not received."""
        return -1, -1, 0, "uint8"
