"""Torch's store as ranks may rely on it: every question ends in time, every record is signed.

A store is a small dictionary that all ranks reach, mostly over the network. It is asked by one
thread, for which everybody else waits with a limit: `_store_connection.py`.

A record is its value behind a signature: an HMAC of the job's secret over key and value. What
somebody wrote who does not have the secret is refused. Without a secret the signature still tells
records from other bytes, but not ranks from those who mean harm.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

from roundelay.errors import RendezvousError
from roundelay.rendezvous._store_connection import (
    ANSWER_S,
    HURRY_S,
    StoreConnection,
    StoreLost,
    first_line,
)

__all__ = [
    "HURRY_S",
    "SILENT_S",
    "OpenStore",
    "Store",
    "StoreLost",
    "first_line",
    "no_store",
    "open_store",
]

T = TypeVar("T")

FIRST_LOOK_S, LATER_LOOK_S = 0.001, 0.05
MEANWHILE_S = 0.5  # to the first look at all else, while one record is waited for
SILENT_S = 3.0  # without a sign of life, until a rank counts as silent, where there is the time
FORGED_S = 1.0  # for a rank to write its own over what somebody else has put there
SIGNATURE = 16  # bytes


@dataclass(frozen=True, slots=True)
class Store:
    """A corner of a store that the ranks of one job share."""

    raw: Any  # of torch
    connection: StoreConnection
    secret: bytes
    where: str  # in words, with who serves it
    corner: str = ""
    home: str | None = None  # the corner of all ranks, where they give signs of life; None is here
    patience: float = ANSWER_S  # for an answer

    def within(self, name: str) -> Store:
        """Return a corner of this corner."""
        return replace(self, corner=f"{self.corner}{name}/")

    def in_hurry(self) -> Store:
        """Return the same corner, for who can't wait long for an answer."""
        return replace(self, patience=HURRY_S)

    def set(self, key: str, value: bytes) -> None:
        """Write a record."""
        name = self.corner + key
        sealed = _sealed(self.secret, name, value)
        self._ask(lambda: self.raw.set(name, sealed))

    def has(self, key: str) -> bool:
        """Tell whether anything was written there."""
        return self._ask(lambda: bool(self.raw.check([self.corner + key])))

    def look(self, key: str) -> bytes | None:
        """Return a record of this job; None if there is none."""
        record = self._read(key) if self.has(key) else None
        return None if record is None else self._opened(key, record)

    def claim(self, key: str, value: bytes) -> bool:
        """Write a record unless there is one, and tell whether this was the first."""
        if not _compares(self.raw):  # the next best thing
            first = not self.has(key)
            if first:
                self.set(key, value)
            return first
        name = self.corner + key
        sealed = _sealed(self.secret, name, value)
        return self._ask(lambda: bytes(self.raw.compare_set(name, "", sealed))) == sealed

    def forget(self, key: str) -> None:
        """Remove a record, where the store can."""
        self._ask(lambda: self.raw.delete_key(self.corner + key))

    def get(self, key: str, timeout: float, meanwhile: Callable[[], None] | None = None) -> bytes:
        """Return a record, waiting for it; raises `TimeoutError`, or that it is not of this job."""
        end, pause = time.monotonic() + timeout, FIRST_LOOK_S
        later = MEANWHILE_S
        due = end - timeout + later
        forged_since: float | None = None
        while True:
            record = self._read(key) if self.has(key) else None
            value = None if record is None else self._opened(key, record)
            if value is not None:
                return value
            now = time.monotonic()
            forged_since = None if record is None else forged_since or now
            if forged_since is not None and now > min(end, forged_since + FORGED_S):
                raise RendezvousError(
                    f"what {self.where} has under {self.corner + key} does not carry the signature "
                    f"of this job. ROUNDELAY_SECRET is not the same on all hosts, or somebody else "
                    f"has written there."
                )
            if now > end:
                raise TimeoutError(key)
            if meanwhile is not None and now > due:
                meanwhile()
                later *= 2  # who comes late comes at any time, and many may wait
                due = time.monotonic() + later
            time.sleep(pause)
            pause = min(2 * pause, LATER_LOOK_S)

    def live(self, rank: int, address: str | None) -> Store:
        """Give signs of life from now on, for as long as the process can."""
        beats, raw, secret, corner = count(), self.raw, self.secret, self.corner
        name = f"{corner}pulse/{rank}"

        def pulse() -> None:
            raw.set(name, _sealed(secret, name, f"{next(beats)} {address or ''}".encode()))

        self.connection.beat(pulse, partial(_signs, raw, secret, f"{corner}pulse/"))
        return replace(self, home=corner)

    def rest(self, rank: int) -> None:
        """Say that this rank needs the store no more, and give no more signs of life."""
        self.connection.beat(None)
        if not self.connection.rests:
            self.connection.rests = True
            home = self.corner if self.home is None else self.home
            replace(self, corner=home).set(f"done/{rank}", b"")

    def rested(self, rank: int) -> bool:
        """Tell whether a rank has said that it needs the store no more."""
        return self.has(f"done/{rank}")

    def silent(self, ranks: Sequence[int], patience: float = SILENT_S) -> dict[int, str]:
        """Return those of the ranks that give no sign of life, and the addresses of their hosts.

        Where somebody has waited for them, they were watched already, and nobody waits once more.
        """
        while True:
            signs, now = self.connection.signs(ranks, self.patience), time.monotonic()
            if all(sign.lives or now - sign.since >= patience for sign in signs.values()):
                break
            time.sleep(LATER_LOOK_S)
        return {
            rank: sign.text.decode().partition(" ")[2]
            for rank, sign in signs.items()
            if now - sign.since >= patience
        }

    def _ask(self, ask: Callable[[], T]) -> T:
        return self.connection.ask(ask, self.patience)

    def _read(self, key: str) -> bytes:
        return self._ask(lambda: bytes(self.raw.get(self.corner + key)))

    def _opened(self, key: str, found: bytes) -> bytes | None:
        return _opened(self.secret, self.corner + key, found)


def no_store() -> Store:
    """Refuse: these ranks find one another without a store."""
    raise RendezvousError("these ranks have no store by which they could find one another.")


def open_store(make: Callable[[], Any], where: str, secret: bytes, timeout: float) -> Store:
    """Return the store that `make` connects to, within the timeout."""
    connection = StoreConnection(where)
    return Store(connection.ask(make, timeout), connection, secret, where)


def _compares(raw: Any) -> bool:
    """Tell whether a store of torch's has `compare_set`: those in Python, as that of etcd, may not.

    Asking such a one anyway looks as if the store had gone.
    """
    while hasattr(raw, "underlying_store"):
        raw = raw.underlying_store
    kind = type(raw)
    return kind.__module__.startswith("torch._C") or "compare_set" in vars(kind)


def _signs(raw: Any, secret: bytes, corner: str, ranks: Sequence[int]) -> dict[int, bytes]:
    """Read signs of life; on the thread that asks, of which the connection must not be part."""
    names = {rank: f"{corner}{rank}" for rank in ranks}
    if not raw.check(list(names.values())):
        names = {rank: name for rank, name in names.items() if raw.check([name])}
    every = raw.multi_get if raw.has_extended_api() else partial(map, raw.get)
    records = zip(names.items(), every(list(names.values())), strict=True)
    return {rank: _opened(secret, name, bytes(sealed)) or b"" for (rank, name), sealed in records}


def _opened(secret: bytes, name: str, found: bytes) -> bytes | None:
    """Return the value of a record; None if its signature is not of this job."""
    value = found[SIGNATURE:]
    return value if hmac.compare_digest(found, _sealed(secret, name, value)) else None


def _sealed(secret: bytes, name: str, value: bytes) -> bytes:
    """Return a value behind its signature."""
    text = f"{name}\n".encode() + value
    return hmac.digest(secret or b"nobody's", text, "sha256")[:SIGNATURE] + value


#: Opens the store of a job, if anybody needs it.
OpenStore = Callable[[], Store]
