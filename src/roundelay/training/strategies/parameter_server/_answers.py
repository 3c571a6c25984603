"""How a parameter server answers workers, of whom one may be lost before it has the answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roundelay._typing import Buffer
from roundelay.communicator import Communicator
from roundelay.errors import PeerLost
from roundelay.training.strategies.parameter_server._messages import (
    DATA,
    REPLY,
    TEXT,
    ServerReply,
    Status,
    as_text,
)

EVER = 10 * 365 * 86400.0  # seconds that a server waits for somebody to ask


@dataclass(frozen=True, slots=True)
class Channels:
    """Two groups of all ranks: one that carries requests, one that carries answers.

    Two, because a rank may be worker and server at once, in two threads: in each group only one of
    them sends, and only the other receives.
    """

    asks: Communicator
    answers: Communicator


class Answers:
    """A server's way to its workers; counts the bytes that go to other ranks and come from them."""

    def __init__(self, channels: Channels, room: int) -> None:
        self._channels = channels
        self._word = np.zeros(room)
        self.moved = (0, 0)  # bytes sent and received

    def count(self, workers: Iterable[int], *, sent: int = 0, received: int = 0) -> None:
        """Count bytes, unless a worker is on this very rank."""
        others = sum(worker != self._channels.asks.rank for worker in workers)
        self.moved = self.moved[0] + others * sent, self.moved[1] + others * received

    def send(
        self,
        workers: Sequence[int],
        reply: ServerReply,
        data: Sequence[torch.Tensor] = (),
        *,
        tag: int = REPLY,
    ) -> None:
        """Send the same answer, and the same data, to all of these."""
        send = self._channels.answers.start.send
        reply.write(self._word)
        self.count(workers, sent=self._word.nbytes + sum(one.nbytes for one in data))
        parts: list[tuple[int, Buffer]] = [(tag, self._word)]
        parts += [(DATA + at, one) for at, one in enumerate(data)]
        letters = []
        for number, part in parts:
            for worker in workers:
                with self.unless_lost(worker):
                    letters.append((worker, send(part, worker, number)))
        for worker, letter in letters:  # until then, what they carry must stay as it is
            with self.unless_lost(worker):
                letter.wait()

    def tell(self, error: Exception, workers: Sequence[int]) -> None:
        """Have these raise an error."""
        text = as_text(error)
        self.send(workers, ServerReply(Status.FAILED, length=len(text)))
        for worker in workers:
            with self.unless_lost(worker):
                self._channels.answers.send(text, worker, TEXT)

    @contextlib.contextmanager
    def unless_lost(self, worker: int) -> Iterator[None]:
        """Go on if what is done for a worker fails because that one is lost."""
        try:
            yield
        except PeerLost:
            if worker not in self._channels.asks.lost():
                raise
