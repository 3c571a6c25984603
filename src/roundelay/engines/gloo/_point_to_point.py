"""Messages with tags, any source and any tag, over a process group's plain sends and receives.

Torch's own receive must name the tag and the exact length. So every message is announced by a
header that says both; a thread for each rank that somebody wants to hear from takes the headers
and matches them with what was asked for, in the order in which they came.

A send copies its data and returns, unless much is under way already; then it waits until some of
it was taken. A rank that waits, to send or to receive, takes in whatever comes: so ranks that all
send first and receive afterwards never wait for one another, whatever the size.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from roundelay.engines._call import MessageCall
from roundelay.engines.gloo._requests import EVER, Arrived, GlooReceipt, GlooSend
from roundelay.engines.gloo.groups import as_tensor, seconds
from roundelay.errors import CollectiveTimeout, CommunicationError
from roundelay.reductions import DTYPES, Array

#: Slots of the process group: walked schedules use 1, headers 2, the rest is what they announce.
HEADER, CONTENT, NUMBERS = 2, 16, 1 << 30
SMALL = 64 * 1024  # bytes up to which a message comes without being asked for
MOST_SMALL = 1024  # of these to one rank, before a send waits
MOST_COPIED = 64 << 20  # bytes of larger ones, to all ranks, before a send waits
SOON_S = 0.02  # for a message to come before this rank takes in others


class GlooPointToPoint:
    """The messages of one rank of a group."""

    def __init__(
        self,
        torch: Any,
        group: Any,
        rank: int,
        size: int,
        explain: Callable[[BaseException], CommunicationError],
        has_left: Callable[[int], bool],
    ) -> None:
        self._torch, self._group, self.rank, self._size = torch, group, rank, size
        self._explain, self._has_left = explain, has_left
        self._news = threading.Condition()
        self._wanted: list[GlooReceipt] = []  # in the order in which they were asked for
        self._unasked: list[Arrived] = []  # in the order in which they came
        self._listeners: dict[int, threading.Thread] = {}
        self._senders: list[threading.Thread] = []
        self._gone: dict[int, RuntimeError] = {}  # ranks that have said goodbye
        self._lost: CommunicationError | None = None  # since a rank went without a goodbye
        self._numbers = [0] * size  # of messages to every rank
        self._small: list[deque[tuple[Any, ...]]] = [deque() for _ in range(size)]
        self._copied = 0  # bytes under way of which this is the only holder
        self._posting = threading.Lock()  # headers go out in the order of their numbers
        self._waiting = 0  # threads of this rank that wait for mail to move

    def post(self, message: MessageCall, limit: float) -> GlooReceipt | GlooSend:
        """Send a message, or ask for one."""
        data, other, tag = message.data.view(np.uint8), message.other, message.tag
        if not message.sends or other is None or tag is None:
            return self.receive(data, other, tag)
        return self.send(
            data, message.dtype, other, tag, limit=limit, background=message.background
        )

    def send(
        self, data: Array, dtype: str, dst: int, tag: int, *, limit: float, background: bool
    ) -> GlooSend:
        """Send bytes: a copy of them, unless the caller leaves them alone in the meantime."""
        if dst == self.rank:
            self._take(Arrived(dst, tag, data.nbytes, dtype, data.copy()))
            return GlooSend(dst, [], [])
        small = data.nbytes <= SMALL
        copied = 0 if small or background else data.nbytes
        self._wait_for_room(dst, copied, limit)
        works, tensors = self._posted(
            data if background and not small else data.copy(), dtype, dst, tag
        )
        if small:
            self._small[dst].append((works, tensors))
            return GlooSend(dst, [], [])
        sent = GlooSend(dst, works, tensors, lambda: self._note_copied(-copied))
        with self._posting:
            self._senders = [*(thread for thread in self._senders if thread.is_alive()), sent.go()]
        return sent if background else GlooSend(dst, [], [])

    def _posted(self, kept: Array, dtype: str, dst: int, tag: int) -> tuple[list[Any], list[Any]]:
        with self._posting:
            number = self._numbers[dst]
            self._numbers[dst] += 1
            header = np.array([tag, kept.nbytes, DTYPES.index(dtype), number], np.int64)
            tensors = [as_tensor(self._torch, header)]
            works = [self._group.send([tensors[0]], dst, HEADER)]
            if kept.nbytes:
                tensors.append(as_tensor(self._torch, kept))
                works.append(self._group.send([tensors[1]], dst, CONTENT + number % NUMBERS))
        return works, tensors

    def _wait_for_room(self, dst: int, copied: int, limit: float) -> None:
        """Wait while much is under way, and count what is to come."""
        if len(self._small[dst]) >= MOST_SMALL:
            with self._taking_in():
                self._wait_for_oldest(dst, MOST_SMALL // 2, limit)
        if copied and self._copied > MOST_COPIED:
            with self._taking_in(), self._news:
                if not self._news.wait_for(lambda: self._copied <= MOST_COPIED, limit):
                    raise CollectiveTimeout(
                        f"Rank {self.rank} waited {limit:g} s to send to rank {dst}: "
                        f"{self._copied} bytes that it sent before have not been taken."
                    )
        self._note_copied(copied)

    def _note_copied(self, more: int) -> None:
        if more:
            with self._news:
                self._copied += more
                self._news.notify_all()

    def receive(self, data: Array, src: int | None, tag: int | None) -> GlooReceipt:
        """Ask for the next message that fits."""
        receipt = GlooReceipt(self, data, src, tag)
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
        if not self._copied and not any(self._small):
            return
        with contextlib.suppress(RuntimeError, CommunicationError), self._taking_in():
            for dst in range(self._size):  # who is gone takes nothing
                self._wait_for_oldest(dst, 0, limit)
            with self._news:
                self._news.wait_for(lambda: not self._copied, limit)

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

    def _wait_for_oldest(self, dst: int, most: int, limit: float) -> None:
        while len(self._small[dst]) > most:
            works, _ = self._small[dst].popleft()
            for work in works:
                work.wait(seconds(limit))

    @contextlib.contextmanager
    def _taking_in(self) -> Iterator[None]:
        """Take in all that comes while this rank waits, so that nobody waits for it."""
        with self._news:
            self._waiting += 1
            announced = [each for each in self._unasked if each.content is None]
        try:
            for other in range(self._size):
                self._listen_to(other)
            for each in announced:
                self._fetch(each)
            yield
        finally:
            with self._news:
                self._waiting -= 1

    def _fetch(self, arrived: Arrived) -> None:
        """Bring the content of a message that nobody has asked for."""
        with arrived.fetching:
            if arrived.content is None:
                arrived.content = self._content(arrived, np.empty(arrived.nbytes, np.uint8))

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
                self._take(Arrived(src, tag, nbytes, DTYPES[code], None, number))
        except RuntimeError as error:
            if self._has_left(src):
                self._gone[src] = error
            else:
                self._lost = self._explain(error)
            self._note_gone()

    def _take(self, arrived: Arrived) -> None:
        """Match what has come; large ones that nobody asked for stay, unless this rank waits."""
        with self._news:
            receipt = self._asking(arrived)
        if receipt is None:
            if arrived.nbytes <= SMALL or self._waiting:
                self._fetch(arrived)
            with self._news:
                receipt = self._asking(arrived)  # somebody may have in the meantime
                if receipt is None:
                    self._unasked.append(arrived)
        if receipt is not None:
            self._fill(receipt, arrived)

    def _asking(self, arrived: Arrived) -> GlooReceipt | None:
        """Take the first who asks for a message out of the line."""
        receipt = next((each for each in self._wanted if each.fits(arrived)), None)
        if receipt is not None:
            self._wanted.remove(receipt)
        return receipt

    def _fill(self, receipt: GlooReceipt, arrived: Arrived) -> None:
        """Bring the content to who asked for it; its sender has begun, so it will come."""
        error = None
        fits = arrived.nbytes == receipt.data.nbytes
        try:
            with arrived.fetching:
                if arrived.content is None:
                    own = receipt.data if fits else np.empty(arrived.nbytes, np.uint8)
                    arrived.content = self._content(arrived, own)[:0]  # no longer ours
                elif fits:
                    receipt.data[:] = arrived.content
        except RuntimeError as failed:
            error = self._explain(failed)
        with self._news:
            receipt.finish(arrived, error)
            self._news.notify_all()

    def _content(self, arrived: Arrived, into: Array) -> Array:
        if arrived.nbytes:
            tensor = as_tensor(self._torch, into)
            self._group.recv([tensor], arrived.src, CONTENT + arrived.number % NUMBERS).wait()
        return into

    def _note_gone(self) -> None:
        """End the wait for ranks that send no more."""
        with self._news:
            everyone = len(self._gone) == self._size - 1 > 0
            for receipt in list(self._wanted):
                error = self._lost or self._gone.get(-1 if receipt.src is None else receipt.src)
                if receipt.src is None and everyone:
                    error = next(iter(self._gone.values()))
                if error is not None:
                    self._wanted.remove(receipt)
                    receipt.finish(None, error)
            self._news.notify_all()

    def wait_for(self, receipt: GlooReceipt, limit: float) -> None:
        """Wait until a receipt is settled, or raise."""
        with self._news:
            settled = self._news.wait_for(receipt.done, min(SOON_S, limit))
        if not settled:
            with self._taking_in(), self._news:
                settled = self._news.wait_for(receipt.done, limit)
        if not settled:
            who = "any rank" if receipt.src is None else f"rank {receipt.src}"
            raise CollectiveTimeout(
                f"Rank {self.rank} waited {limit:g} s for a message from {who}, and none came."
            )
        if receipt.error is not None:
            raise receipt.error
