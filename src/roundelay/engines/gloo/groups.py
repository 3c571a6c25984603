"""What the engines on torch's process groups share: how they meet, and what their errors mean."""

from __future__ import annotations

import contextlib
import importlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from roundelay.arguments import FOREVER_S
from roundelay.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicationError,
    InvalidArgumentError,
    MissingPackageError,
    PeerLost,
)
from roundelay.processes.reports import run_forked
from roundelay.reductions import Array
from roundelay.rendezvous.by_store import StoreRendezvous
from roundelay.rendezvous.store import HURRY_S, SILENT_S, Store, StoreLost, open_store

__all__ = [
    "HeldGroup",
    "Trouble",
    "as_tensor",
    "fork_at",
    "load_torch",
    "seconds",
    "signed_store",
]

LATE = re.compile(r"timed? ?out", re.IGNORECASE)
PLACE = re.compile(r"^\[[^\]]*:\d+\] ?")
ADVICE = re.compile(r" This is typically caused by.*")
TOLD = (CollectiveMismatch, CollectiveTimeout)  # as what they are; all else means a lost rank
HERE = "127.0.0.1"
HERE_S = 60.0  # for forks of one process to find one another
SOON_S = 0.25  # for the first to say why: Gloo cuts the lines before that rank gets to


def load_torch(engine: str) -> Any:  # optional, so without types
    """Return torch, or say how to get it."""
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("torch.distributed")
    except ModuleNotFoundError:
        raise MissingPackageError(f"The engine {engine}", "torch") from None
    if not torch.distributed.is_available():
        raise InvalidArgumentError(
            f"The engine {engine} needs torch.distributed, which this torch was built without. "
            f"Install one that has it: pip install 'roundelay[torch]'"
        )
    return torch


def fork_at(size: int, body: Callable[[StoreRendezvous], bytes]) -> list[bytes]:
    """Run `body` on `size` new processes of this host, which find one another in a folder."""
    torch = load_torch("gloo")
    with tempfile.TemporaryDirectory(prefix="roundelay-gloo-") as folder:
        make = partial(torch.distributed.FileStore, str(Path(folder) / "store"), size)

        def be_rank(_: object, rank: int) -> bytes:
            store = open_store(make, f"the store in {folder}", b"", HERE_S)
            return body(StoreRendezvous(store, rank, size, HERE))

        return run_forked(size, be_rank)


def seconds(limit: float) -> timedelta:
    """Return a time in torch's words, which know nothing below a millisecond, and no infinity."""
    return timedelta(seconds=min(max(limit, 0.001), FOREVER_S))


def signed_store(distributed: Any, store: Store, timeout: float) -> Any:
    """Return a store as torch's process groups know them; what they write is signed, too."""

    class Signed(distributed.Store):  # type: ignore[misc] # torch is optional, so without types
        def set(self, key: str, value: bytes) -> None:
            store.set(key, value)

        def get(self, key: str) -> bytes:
            return store.get(key, timeout)

        def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
            for key in keys:
                store.get(key, timeout if limit is None else limit.total_seconds())

        def check(self, keys: Sequence[str]) -> bool:
            return all(map(store.has, keys))

    return Signed()


def as_tensor(torch: Any, array: Array) -> Any:
    """Return the memory of a flat contiguous array as a tensor of its own."""
    # torch warns of memory that may not be written, though it is only read here.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class HeldGroup:
    """A process group of torch's, until it is let go, whoever still has this: an error's traceback.

    The threads of a group end with its last reference. One that gave back a tensor only while the
    interpreter ends would take the process down with it.
    """

    def __init__(self, group: Any, store: Any) -> None:
        self._group = group
        self._store = store  # it has a part in Python, which must not end before the group

    def __getattr__(self, name: str) -> Any:
        if self._group is None:
            raise RuntimeError("The process group was closed.")
        return getattr(self._group, name)

    def let_go(self) -> None:
        """Give up the reference, and with it the threads."""
        self._group = None


class Trouble:
    """What went wrong in a group, told through its store so that all ranks raise the same."""

    def __init__(self, rendezvous: StoreRendezvous) -> None:
        self._store, self._rank, self._size = (
            rendezvous.store.in_hurry(),
            rendezvous.rank,
            rendezvous.size,
        )
        self._ranks = list(rendezvous.ranks or range(rendezvous.size))
        self._others = [rank for rank in self._ranks if rank != self._me]
        self.told: CommunicationError | None = None

    def check(self) -> None:
        """Raise what has gone wrong before."""
        if self.told is not None:
            raise type(self.told)(str(self.told)) from self.told.__cause__

    def tell(self, error: CommunicationError) -> None:
        """Let the others know, unless one of them was first."""
        with contextlib.suppress(Exception):  # its server may be what is gone
            if self._claim():
                self._say(error)

    def leave(self, raised: str = "") -> None:
        """Say that this rank is done, so that its end is no death; `raised` is by what."""
        with contextlib.suppress(Exception):
            self._store.set(f"left/{self._rank}", raised.encode())

    def has_left(self, rank: int) -> bool:
        """Tell whether a rank has said that it is done."""
        with contextlib.suppress(Exception):
            return self._store.has(f"left/{rank}")
        return False

    def waiting(self) -> AbstractContextManager[None]:
        """See meanwhile whether the others give signs of life."""
        return self._store.connection.waiting_for(self._others)

    @contextlib.contextmanager
    def watched(self, limit: float) -> Iterator[None]:
        """Turn what torch raises into our errors; after the first one, nothing else is raised."""
        self.check()
        with self.waiting():
            try:
                yield
            except CommunicationError as error:
                self.told = self.told or self._with_reason(error, limit)
                raise self.told from None
            except RuntimeError as error:
                raise self.explain(error, limit) from error

    def explain(self, error: BaseException, limit: float) -> CommunicationError:
        """Return what a failure of torch's means: what others told, or what can be told from it."""
        if self.told is None:
            late = LATE.search(_gist(error)) is not None
            told = self._heard(error, limit, late=late)
            told.__cause__ = error
            self.told = told
        return type(self.told)(str(self.told))

    def _heard(self, error: BaseException, limit: float, *, late: bool) -> CommunicationError:
        """Let the first rank that has something to say say it, and the others repeat it."""
        try:
            told = self._asked(0.0 if late else SOON_S)
            if told is None and self._claim():
                told = self._late(error, limit) if late else self._gone(error)
                self._say(told)
            return told or self._asked(HURRY_S) or self._gone(error, self._why(limit))
        except StoreLost as lost:
            return self._alone(error, limit, lost, late=late)

    def _claim(self) -> bool:
        return self._store.claim("trouble/first", str(self._rank).encode())

    def _say(self, error: CommunicationError) -> None:
        self._store.set("trouble/text", f"{type(error).__name__} {error}".encode())

    def _asked(self, soon: float) -> CommunicationError | None:
        """Return what another rank tells; wait so long for one to begin."""
        began = time.monotonic()
        while True:
            text = self._store.look("trouble/text")
            if text is not None:
                kind, _, said = text.decode().partition(" ")
                return next((error for error in TOLD if error.__name__ == kind), PeerLost)(said)
            patience = HURRY_S if self._store.has("trouble/first") else soon
            if time.monotonic() >= began + patience:
                return None
            time.sleep(0.01)

    def _late(self, error: BaseException, limit: float) -> CommunicationError:
        why = self._why(limit)
        return CollectiveTimeout(
            f"{self._waited(limit)}{f', and {why}' if why else ''}. ({_gist(error)})"
        )

    def _why(self, limit: float) -> str:
        """Say who gives no sign of life, if that is why the others were waited for in vain."""
        # They were watched for most of the time that they were waited for.
        patience = min(SILENT_S, max(HURRY_S, limit - HURRY_S))
        try:
            silent = self._store.silent(self._others, patience)
        except StoreLost as lost:
            return _cut_off(lost)
        if not silent:
            return ""
        named = ", ".join(f"{rank} ({at})" if at else str(rank) for rank, at in silent.items())
        whose = f"rank {named}: its host" if len(silent) == 1 else f"ranks {named}: their hosts"
        return f"there is no sign of life from {whose} may be cut off, or frozen"

    def _with_reason(self, error: CommunicationError, limit: float) -> CommunicationError:
        """Return an error of ours; one that came of waiting says who was silent."""
        why = self._why(limit) if isinstance(error, CollectiveTimeout) else ""
        return CollectiveTimeout(f"{error} {why[0].upper()}{why[1:]}.") if why else error

    def _gone(self, error: BaseException, why: str = "") -> CommunicationError:
        gone = [rank for rank in range(self._size) if self.has_left(rank)]
        left = [self._ranks[rank] for rank in gone]
        for rank in gone:
            if raised := self._store.look(f"left/{rank}"):
                return PeerLost(f"Rank {self._ranks[rank]} failed: {raised.decode()}")
        if left:
            who = f"Rank {left[0]} has" if len(left) == 1 else f"Ranks {_listed(left)} have"
            return PeerLost(f"{who} finished, but rank {self._me} still needs it. ({_gist(error)})")
        more = f", and {why}" if why else ""
        return PeerLost(
            f"Rank {self._me} lost a rank that it communicates with{more}. ({_gist(error)})"
        )

    def _alone(
        self, error: BaseException, limit: float, lost: StoreLost, *, late: bool
    ) -> CommunicationError:
        kind = CollectiveTimeout if late else PeerLost
        what = self._waited(limit) if late else f"Rank {self._me} lost a rank"
        return kind(f"{what}, and {_cut_off(lost)}. ({_gist(error)})")

    def _waited(self, limit: float) -> str:
        return f"Rank {self._me} waited {limit:g} s for the others"

    @property
    def _me(self) -> int:
        return self._ranks[self._rank]


def _gist(error: BaseException) -> str:
    """Return what torch says without where in its source it says so, and without its advice."""
    said = str(error).strip().splitlines()[:1] or [type(error).__name__]
    return ADVICE.sub("", PLACE.sub("", said[0])).rstrip(". ")


def _cut_off(lost: StoreLost) -> str:
    return f"{lost}: that host is gone, frozen or cut off, or this one is cut off"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
