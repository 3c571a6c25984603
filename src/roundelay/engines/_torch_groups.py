"""What the engines on torch's process groups share: how they meet, and what their errors mean."""

from __future__ import annotations

import contextlib
import importlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from roundelay.arguments import FOREVER_S
from roundelay.engines._end import ScheduleFor
from roundelay.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicationError,
    InvalidArgumentError,
    MissingPackageError,
    PeerLost,
)
from roundelay.reductions import Array

__all__ = ["Held", "Meeting", "Schedules", "Trouble", "as_tensor", "load_torch", "seconds"]

#: Gives what finds schedules for groups of so many ranks.
Schedules = Callable[[int], ScheduleFor]

LATE = re.compile(r"timed? ?out", re.IGNORECASE)
PLACE = re.compile(r"^\[[^\]]*:\d+\] ?")
ADVICE = re.compile(r" This is typically caused by.*")
TOLD = (CollectiveMismatch, CollectiveTimeout)  # as what they are; all else means a lost rank
PATIENCE_S = 0.5  # for the rank that found the trouble to say what it is
SOON_S = 0.25  # for it to begin: Gloo cuts the lines before that rank gets to say why


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


def seconds(limit: float) -> timedelta:
    """Return a time in torch's words, which know nothing below a millisecond, and no infinity."""
    return timedelta(seconds=min(max(limit, 0.001), FOREVER_S))


def as_tensor(torch: Any, array: Array) -> Any:
    """Return the memory of a flat contiguous array as a tensor of its own."""
    # torch warns of memory that may not be written, though it is only read here.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the processes of a group find one another, and which of them this one is."""

    store: Any  # of torch: a small dictionary that every rank can reach
    rank: int
    size: int
    address: str | None = None  # of this host, as others reach it; None lets torch choose

    def within(self, name: str, rank: int, size: int) -> Meeting:
        """Return the meeting of a group of some of these ranks."""
        distributed = importlib.import_module("torch.distributed")
        return Meeting(distributed.PrefixStore(name, self.store), rank, size, self.address)


class Held:
    """A process group of torch's, until it is let go, whoever still has this: an error's traceback.

    The threads of a group end with its last reference. One that gave back a tensor only while the
    interpreter ends would take the process down with it.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        if self._group is None:
            raise RuntimeError("The process group was closed.")
        return getattr(self._group, name)

    def let_go(self) -> None:
        """Give up the reference, and with it the threads."""
        self._group = None


class Trouble:
    """What went wrong in a group, told through its store so that all ranks raise the same."""

    def __init__(self, meeting: Meeting) -> None:
        self._store, self._rank, self._size = meeting.store, meeting.rank, meeting.size
        self.told: CommunicationError | None = None

    def check(self) -> None:
        """Raise what has gone wrong before."""
        if self.told is not None:
            raise type(self.told)(str(self.told)) from self.told.__cause__

    def tell(self, error: CommunicationError) -> None:
        """Let the others know, unless one of them was first."""
        word = f"{type(error).__name__} {error}"
        with contextlib.suppress(Exception):  # its server may be what is gone
            if self._store.add("trouble/number", 1) == 1:
                self._store.set("trouble/text", word)

    def leave(self) -> None:
        """Say that this rank is done, so that its end is no death."""
        with contextlib.suppress(Exception):
            self._store.set(f"left/{self._rank}", "1")

    @contextlib.contextmanager
    def watched(self, limit: float) -> Iterator[None]:
        """Turn what torch raises into our errors; after the first one, nothing else is raised."""
        self.check()
        try:
            yield
        except CommunicationError as error:
            self.told = self.told or error
            raise
        except RuntimeError as error:
            raise self.explain(error, limit) from error

    def explain(self, error: BaseException, limit: float) -> CommunicationError:
        """Return what a failure of torch's means: what others told, or what can be told from it."""
        if self.told is None:
            late = LATE.search(_gist(error)) is not None
            self.told = self._asked(0.0 if late else SOON_S) or self._own(error, limit)
            self.told.__cause__ = error
            self.tell(self.told)
        return type(self.told)(str(self.told))

    def _asked(self, soon: float) -> CommunicationError | None:
        """Return what another rank tells; wait so long for one to begin."""
        began = time.monotonic()
        with contextlib.suppress(Exception):
            while time.monotonic() < began + (
                PATIENCE_S if self._store.check(["trouble/number"]) else soon
            ):
                if self._store.check(["trouble/text"]):
                    kind, _, text = self._store.get("trouble/text").decode().partition(" ")
                    return next((one for one in TOLD if one.__name__ == kind), PeerLost)(text)
                time.sleep(0.01)
        return None

    def _own(self, error: BaseException, limit: float) -> CommunicationError:
        text = _gist(error)
        if LATE.search(text):
            return CollectiveTimeout(
                f"Rank {self._rank} of {self._size} waited {limit:g} s for the others. ({text})"
            )
        left = self._left()
        if left:
            who = f"Rank {left[0]} has" if len(left) == 1 else f"Ranks {_listed(left)} have"
            return PeerLost(f"{who} finished, but rank {self._rank} still needs it. ({text})")
        return PeerLost(
            f"Rank {self._rank} of {self._size} lost a rank that it communicates with. ({text})"
        )

    def _left(self) -> list[int]:
        return [rank for rank in range(self._size) if self.has_left(rank)]

    def has_left(self, rank: int) -> bool:
        """Tell whether a rank has said that it is done."""
        with contextlib.suppress(Exception):
            return bool(self._store.check([f"left/{rank}"]))
        return False


def _gist(error: BaseException) -> str:
    """Return what torch says without where in its source it says so, and without its advice."""
    said = str(error).strip().splitlines()[:1] or [type(error).__name__]
    return ADVICE.sub("", PLACE.sub("", said[0])).rstrip(". ")


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
