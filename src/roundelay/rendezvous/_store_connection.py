"""The one thread that asks torch's store, and what it knows: who lives, and whether it answers.

Torch's store waits for an answer without a limit, so when its host is cut off or frozen, whoever
asks hangs. Here a thread does the asking, and everybody else waits for that thread with a limit.
While a rank waits for others, the thread also looks whether they give signs of life. So when the
timeout comes, who is silent, or that the store is, is known already.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from roundelay.errors import RendezvousError

T = TypeVar("T")

ANSWER_S = 5.0  # for a store to answer what it can answer at once
HURRY_S = 1.0  # the same, once something is wrong and somebody must be told
PULSE_S = 0.5  # between two signs of life, and between two looks at those of others
WATCHED = 3  # looks that may be missed

#: Reads the signs of life of some ranks.
Look = Callable[[Sequence[int]], dict[int, bytes]]


@dataclass(frozen=True, slots=True)
class Sign:
    """A rank's latest sign of life: since when it is this one, and when it was looked for."""

    text: bytes
    since: float
    looked: float
    lives: bool = False  # there was another one a moment before this one


class StoreLost(RendezvousError):  # noqa: N818 - as PeerLost is
    """The store does not answer."""


class _Asking:
    """What the thread knows; it must not keep the connection alive, with which it ends."""

    def __init__(self) -> None:
        #: What to ask, and where the answer goes; None ends the thread.
        self.questions: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self.questions = queue.SimpleQueue()
        self.gone: str | None = None
        self.since: float | None = None  # when it was asked what it has not answered yet
        self.given_up: float | None = None  # the `since` of which somebody thought it was too long
        self.pulse: Callable[[], None] | None = None
        self.look: Look | None = None
        self.waiting: dict[object, tuple[float, Sequence[int]]] = {}  # since when, for which ranks
        self.seen: dict[int, Sign] = {}

    def serve(self) -> None:
        due = time.monotonic()
        while True:
            if time.monotonic() >= due:  # also while others have much to ask
                due = time.monotonic() + PULSE_S
                self._beat()
            try:
                question = self.questions.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                continue
            if question is None:
                return
            ask, answer = question
            try:
                with self._asked():
                    answer.set_result(ask())
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                answer.set_exception(error)

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.since = None

    def _beat(self) -> None:
        if self.pulse is None or self.gone is not None:
            return
        try:
            with self._asked():
                self.pulse()
                self.note(self._awaited())
        except RuntimeError as error:
            self.gone = f"is gone ({first_line(error)})"

    def _awaited(self) -> set[int]:
        """Return the ranks for which somebody has waited for a while."""
        long_ago = time.monotonic() - PULSE_S
        waiting = list(self.waiting.values())
        return {rank for since, ranks in waiting if since < long_ago for rank in ranks}

    def note(self, ranks: Iterable[int]) -> None:
        """Look for signs of life."""
        wanted, now = sorted(ranks), time.monotonic()
        found = self.look(wanted) if self.look is not None and wanted else {}
        for rank in wanted:
            text = found.get(rank, b"")
            before = self.seen.get(rank) or Sign(text, now, 0.0)
            if text == before.text:
                self.seen[rank] = replace(before, looked=now)
            else:
                lives = before.looked > now - WATCHED * PULSE_S
                self.seen[rank] = Sign(text, now, now, lives=lives)


class StoreConnection:
    """Asks the store; while one question goes without an answer for too long, all fail at once."""

    def __init__(self, where: str) -> None:
        self._where, self._asking = where, _Asking()
        self._pid = os.getpid()
        self.rests = False  # nothing more will be asked
        name = "roundelay-store"
        threading.Thread(target=self._asking.serve, name=name, daemon=True).start()
        weakref.finalize(self, self._asking.questions.put, None)

    def ask(self, ask: Callable[[], T], limit: float = ANSWER_S) -> T:
        """Return the answer; the time that the question before has waited for its own counts."""
        asking = self._asking
        if self._pid != os.getpid():
            raise StoreLost(f"{self._where} is asked by process {self._pid}, not by its forks")
        if asking.gone is not None:
            raise StoreLost(f"{self._where} {asking.gone}")
        began = asking.since
        if began is None or began != asking.given_up:
            answer: Future[T] = Future()
            asking.questions.put((ask, answer))
            began = time.monotonic() if began is None else began
            try:
                return answer.result(max(0.0, began + limit - time.monotonic()))
            except TimeoutError:
                asking.given_up = asking.since
            except RuntimeError as error:  # of torch's: the connection was cut, the server ended
                asking.gone = f"is gone ({first_line(error)})"
                raise StoreLost(f"{self._where} {asking.gone}") from None
        silence = round(time.monotonic() - began, 1)
        raise StoreLost(f"{self._where} has not answered for {silence:g} s")

    @property
    def silent_for(self) -> float:
        """Seconds for which the store owes an answer."""
        since = self._asking.since
        return 0.0 if since is None else time.monotonic() - since

    def beat(self, pulse: Callable[[], None] | None, look: Look | None = None) -> None:
        """Do this now and ever again, and look so at the signs of others; None ends it."""
        if pulse is not None:
            self.ask(pulse)
            self._asking.look = look
        self._asking.pulse = pulse

    @contextlib.contextmanager
    def waiting_for(self, ranks: Sequence[int]) -> Iterator[None]:
        """Look for signs of life of these ranks, if what is done meanwhile takes long."""
        waiting, key = self._asking.waiting, object()
        waiting[key] = time.monotonic(), ranks
        try:
            yield
        finally:
            del waiting[key]

    def signs(self, ranks: Sequence[int], limit: float) -> dict[int, Sign]:
        """Return the latest sign of life of every rank; none of anybody if this one gives none."""
        if self._asking.look is None:  # nobody gives any
            return {}
        self.ask(lambda: self._asking.note(ranks), limit)
        return {rank: self._asking.seen[rank] for rank in ranks}


def first_line(error: BaseException) -> str:
    """Return what torch says, without its stack."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(". ")
