"""Torch's store as ranks may rely on it: every question ends in time, every record is signed.

A store is a small dictionary that all ranks reach, mostly over the network. Torch's own waits for
an answer without a limit, so when its host is cut off or frozen, whoever asks hangs. Here one
thread does the asking, and everybody else waits for that thread with a limit.

A record is its value behind a signature: an HMAC of the job's secret over key and value. What
somebody wrote who does not have the secret is refused. Without a secret the signature still tells
records from other bytes, but not ranks from those who mean harm.
"""

from __future__ import annotations

import hmac
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Generic, TypeVar

from roundelay.errors import MeetingError

__all__ = ["SILENT_S", "Store", "StoreLost", "first_line", "open_store"]

T = TypeVar("T")

ANSWER_S = 5.0  # for a store to answer what it can answer at once
FIRST_LOOK_S, LATER_LOOK_S = 0.001, 0.05
PULSE_S = 0.5  # between two signs of life
SILENT_S = 3.0  # without one, until a rank counts as silent
FORGED_S = 1.0  # for a rank to write its own over what somebody else has put there
SIGNATURE = 16  # bytes


class StoreLost(MeetingError):  # noqa: N818 - as PeerLost is
    """The store does not answer."""


class _Question(Generic[T]):
    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._found: list[T] = []
        self._error: Exception | None = None
        self._over = threading.Event()

    def take(self) -> None:
        try:
            self._found.append(self._ask())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        self._over.set()

    def answer(self, limit: float) -> T:
        if not self._over.wait(limit):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._found[0]


class _Asking:
    """What the thread knows; it must not keep the line alive, with which it ends."""

    def __init__(self) -> None:
        self.questions: queue.SimpleQueue[_Question[Any] | None] = queue.SimpleQueue()
        self.lost: str | None = None
        self.pulse: Callable[[], None] | None = None

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
            question.take()

    def _beat(self) -> None:
        if self.pulse is None or self.lost is not None:
            return
        try:
            self.pulse()
        except RuntimeError as error:
            self.lost = f"is gone ({first_line(error)})"


class _Line:
    """The one thread that asks; from the first question without an answer on, all fail at once."""

    def __init__(self, where: str) -> None:
        self._where, self._asking = where, _Asking()
        self._pid = os.getpid()
        self.rests = False  # nothing more will be asked
        name = "roundelay-store"
        threading.Thread(target=self._asking.serve, name=name, daemon=True).start()
        weakref.finalize(self, self._asking.questions.put, None)

    def ask(self, ask: Callable[[], T], limit: float = ANSWER_S) -> T:
        asking = self._asking
        if self._pid != os.getpid():
            raise StoreLost(f"{self._where} is asked by process {self._pid}, not by its forks")
        if asking.lost is not None:
            raise StoreLost(f"{self._where} {asking.lost}")
        question = _Question(ask)
        asking.questions.put(question)
        try:
            return question.answer(limit)
        except TimeoutError:
            asking.lost = f"has not answered for {round(limit, 1):g} s"
        except RuntimeError as error:  # of torch's: the line was cut, the server ended
            asking.lost = f"is gone ({first_line(error)})"
        raise StoreLost(f"{self._where} {asking.lost}")

    def beat(self, pulse: Callable[[], None] | None) -> None:
        """Do this now, and again whenever there was nothing to ask for a while; None ends it."""
        if pulse is not None:
            self.ask(pulse)
        self._asking.pulse = pulse


@dataclass(frozen=True, slots=True)
class Store:
    """A corner of a store that the ranks of one job share."""

    raw: Any  # of torch
    line: _Line
    secret: bytes
    where: str  # in words, with who serves it
    corner: str = ""
    pulses: str | None = None  # the corner of the signs of life, once there are any

    def within(self, name: str) -> Store:
        """Return a corner of this corner."""
        return replace(self, corner=f"{self.corner}{name}/")

    def set(self, key: str, value: bytes) -> None:
        """Write a record."""
        name = self.corner + key
        sealed = _sealed(self.secret, name, value)
        self.line.ask(lambda: self.raw.set(name, sealed))

    def has(self, key: str) -> bool:
        """Tell whether anything was written there."""
        return self.line.ask(lambda: bool(self.raw.check([self.corner + key])))

    def look(self, key: str) -> bytes | None:
        """Return a record of this job; None if there is none."""
        found = self._read(key) if self.has(key) else None
        return None if found is None else self._opened(key, found)

    def claim(self, key: str, value: bytes) -> bool:
        """Write a record unless there is one, and tell whether this was the first."""
        name = self.corner + key
        sealed = _sealed(self.secret, name, value)
        return self.line.ask(lambda: bytes(self.raw.compare_set(name, "", sealed))) == sealed

    def forget(self, key: str) -> None:
        """Remove a record, where the store can."""
        self.line.ask(lambda: self.raw.delete_key(self.corner + key))

    def get(self, key: str, timeout: float) -> bytes:
        """Return a record, waiting for it; raises `TimeoutError`, or that it is not of this job."""
        end, pause = time.monotonic() + timeout, FIRST_LOOK_S
        forged_since: float | None = None
        while True:
            found = self._read(key) if self.has(key) else None
            opened = None if found is None else self._opened(key, found)
            if opened is not None:
                return opened
            now = time.monotonic()
            forged_since = None if found is None else forged_since or now
            if forged_since is not None and now > min(end, forged_since + FORGED_S):
                raise MeetingError(
                    f"what {self.where} has under {self.corner + key} does not carry the signature "
                    f"of this job. ROUNDELAY_SECRET is not the same on all hosts, or somebody else "
                    f"has written there."
                )
            if now > end:
                raise TimeoutError(key)
            time.sleep(pause)
            pause = min(2 * pause, LATER_LOOK_S)

    def live(self, rank: int, address: str | None) -> Store:
        """Give signs of life from now on, for as long as the process can."""
        beats, raw, secret, name = count(), self.raw, self.secret, self.corner + _pulse(rank)

        def pulse() -> None:
            raw.set(name, _sealed(secret, name, f"{next(beats)} {address or ''}".encode()))

        self.line.beat(pulse)
        return replace(self, pulses=self.corner)

    def rest(self, rank: int) -> None:
        """Say that this rank needs the store no more, and give no more signs of life."""
        self.line.beat(None)
        if not self.line.rests:
            self.line.rests = True
            replace(self, corner=self.corner if self.pulses is None else self.pulses).set(
                _done(rank), b""
            )

    def rested(self, rank: int) -> bool:
        """Tell whether a rank has said that it needs the store no more."""
        return self.has(_done(rank))

    def silent(self, ranks: Sequence[int], patience: float = SILENT_S) -> dict[int, str]:
        """Return those of the ranks that give no sign of life, and the addresses of their hosts."""
        if self.pulses is None:
            return {}
        there = replace(self, corner=self.pulses)
        quiet = {rank: there.look(_pulse(rank)) for rank in ranks}
        end = time.monotonic() + patience
        while quiet and time.monotonic() < end:
            time.sleep(LATER_LOOK_S)
            quiet = {rank: was for rank, was in quiet.items() if there.look(_pulse(rank)) == was}
        return {rank: (was or b"").decode().partition(" ")[2] for rank, was in quiet.items()}

    def _read(self, key: str) -> bytes:
        return self.line.ask(lambda: bytes(self.raw.get(self.corner + key)))

    def _opened(self, key: str, found: bytes) -> bytes | None:
        value = found[SIGNATURE:]
        due = _sealed(self.secret, self.corner + key, value)
        return value if hmac.compare_digest(found, due) else None


def open_store(make: Callable[[], Any], where: str, secret: bytes, timeout: float) -> Store:
    """Return the store that `make` connects to, within the timeout."""
    line = _Line(where)
    return Store(line.ask(make, timeout), line, secret, where)


def first_line(error: BaseException) -> str:
    """Return what torch says, without its stack."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(". ")


def _pulse(rank: int) -> str:
    return f"pulse/{rank}"


def _done(rank: int) -> str:
    return f"done/{rank}"


def _sealed(secret: bytes, name: str, value: bytes) -> bytes:
    """Return a value behind its signature."""
    text = f"{name}\n".encode() + value
    return hmac.digest(secret or b"nobody's", text, "sha256")[:SIGNATURE] + value
