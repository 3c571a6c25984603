"""The end of a worker's line: a word to every server, and theirs when all workers have said it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from roundelay.errors import CommunicationError, InvalidArgumentError
from roundelay.training.strategies.parameter_server._answers import EVER, Channels
from roundelay.training.strategies.parameter_server._messages import (
    GOODBYE,
    REQUEST,
    Kind,
    ServerRequest,
)


class Shutdown:
    """What is left of a line when its model is dropped.

    Ranks drop a model when they like, but a group that all others have let go of looks lost to who
    still waits there. So each rank holds its mails until every server has seen all workers go.
    """

    def __init__(
        self, channels: Channels, servers: Sequence[int], rooms: Sequence[tuple[int, int]]
    ) -> None:
        self._channels: Channels | None = channels
        self._to = list(zip(servers, rooms, strict=True))  # and the lengths of request and reply
        self._letters: list[Any] = []  # under way
        self._unsaid = [True]  # taken by who says it
        self._said = threading.Event()
        self.spared = False  # whether the job goes on without this worker, if it is lost
        self.thread: threading.Thread | None = None  # of a server on this rank

    def say(self) -> None:
        """Begin to part, and wait for nothing: finalizers run in any thread, a server's too."""
        try:
            self._unsaid.pop()
        except IndexError:
            return
        try:
            # What raises here finds the communicator closed or broken: nobody needs a goodbye.
            with contextlib.suppress(CommunicationError, InvalidArgumentError):
                self._begin()
        finally:
            self._said.set()

    def _begin(self) -> None:
        if self._channels is None:
            return
        asks, answers = self._channels.asks.start, self._channels.answers.start
        if self.spared:  # who has finished is no longer lost in silence
            self._channels.asks.spare("fails")
        self._channels.answers.timeout = EVER  # others may have much to do yet
        for server, (asked, told) in self._to:
            self._letters.append(answers.recv(np.empty(told), server, GOODBYE))
            word = np.zeros(asked)
            ServerRequest(Kind.BYE).write(word, 0)
            self._letters.append(asks.send(word, server, REQUEST))

    def over(self) -> bool:
        """Tell whether all workers have parted; if so, let go of the mails."""
        if self._channels is None:
            return True
        if not self._said.is_set() or (self.thread is not None and self.thread.is_alive()):
            return False
        try:
            done = all(letter.done() for letter in self._letters)
        except CommunicationError:
            done = True
        if done:
            self._channels, self._letters = None, []
        return done

    def __call__(self) -> None:
        """Part, and wait until all workers have: servers stay till then."""
        self.say()
        self._said.wait()
        with contextlib.suppress(CommunicationError):
            for letter in self._letters:
                letter.wait()
        if self.thread is not None:
            self.thread.join()
        self._channels, self._letters = None, []
