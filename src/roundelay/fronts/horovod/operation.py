"""A named operation: what one rank submits, and waits for."""

from __future__ import annotations

import hashlib
import os
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from functools import lru_cache
from time import monotonic
from types import CodeType
from typing import Any

from roundelay.communicator import Communicator
from roundelay.errors import ranks_text

__all__ = [
    "ALLREDUCE", "BARRIER", "KINDS", "Operation", "Place", "Terms", "differences",
    "kinds_differ", "line_of",
    "lines_told", "number_of",
]  # fmt: skip

#: By the number that travels; the first may run with ranks that have joined.
KINDS = (
    "allreduce", "barrier", "allgather", "broadcast", "alltoall", "reducescatter", "process_set",
)  # fmt: skip
ALLREDUCE, BARRIER = 0, 1
#: Seconds for which a name stays taken, if nobody waits: two calls in a row with one name are a
#: mistake, whether or not the first has happened to end.
LINGER = 0.01

#: What must be alike on all ranks, in words: dtype, shape, reduction …
Terms = tuple[tuple[str, Any], ...]
#: Where the user's program made a call: its code, the instruction, the line.
Place = tuple[CodeType, int, int]


class Operation:
    """What a rank submits; done once it has run, or failed, on all members of its process set."""

    __slots__ = (
        "_done", "_ended", "_error", "_result", "key", "kind", "name", "place", "process_set",
        "run", "terms", "waited",
    )  # fmt: skip

    def __init__(
        self,
        kind: str,
        name: str,
        process_set: int,
        terms: Terms,
        run: Callable[[Communicator], Any],
    ) -> None:
        self.kind, self.name, self.process_set = kind, name, process_set
        self.terms, self.run = terms, run
        self.key = (0, 0)  # by which ranks know it, once it is submitted
        self.place: Place | None = None  # of the call
        self.waited = False  # somebody waits for it
        self._result: Any = None
        self._error: BaseException | None = None
        self._ended = 0.0
        self._done = allocate_lock()
        self._done.acquire()

    def finish(self, result: Any, error: BaseException | None = None) -> None:
        """Give those who wait the result, or an error."""
        self._result, self._error, self._ended = result, error, monotonic()
        self.run = _over  # with all that it holds
        self._done.release()

    def done(self) -> bool:
        """Tell whether `result` would return at once."""
        return not self._done.locked()

    def lingers(self) -> bool:
        """Tell whether it is under way, or ended so lately that nobody can have heard of it."""
        return self._done.locked() or monotonic() - self._ended < LINGER

    def wait(self, seconds: float) -> bool:
        """Wait until it is done, and tell whether it is."""
        if self._done.acquire(timeout=seconds):
            self._done.release()
            return True
        return False

    def failed(self) -> bool:
        """Tell whether `result` would raise."""
        return self._error is not None

    def result(self) -> Any:
        """Return what it gave, or raise what went wrong."""
        if self._error is not None:
            raise self._error
        return self._result

    def __str__(self) -> str:
        where = f" in process set {self.process_set}" if self.process_set else ""
        return f"{self.kind} {self.name!r}{where}"


def _over(_: Communicator) -> None:
    """Stand in the place of what has run."""


@lru_cache(maxsize=4096)
def number_of(thing: str | tuple[Any, ...]) -> int:
    """Return a number that stands for a name, or for terms, on every rank alike."""
    digest = hashlib.blake2b(repr(thing).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def line_of(place: Place | None) -> str:
    """Return the user's line, by the name of its file: folders differ between hosts."""
    return "" if place is None else f"{os.path.basename(place[0].co_filename)}:{place[2]}"  # noqa: PTH119 - in a hot path


def lines_told(members: Sequence[int], lines: Sequence[str]) -> str:
    """Say which rank made its call where, if that differs.

    >>> lines_told([0, 1, 2], ["train.py:7", "train.py:7", "train.py:9"])
    'ranks 0, 1 at train.py:7, rank 2 at train.py:9'
    >>> lines_told([0, 1], ["train.py:7", "train.py:7"])
    ''
    """
    ranks: dict[str, list[int]] = {}
    for rank, line in zip(members, lines, strict=True):
        ranks.setdefault(line or "an unknown line", []).append(rank)
    told = [f"{ranks_text(found)} at {line}" for line, found in ranks.items()]
    return ", ".join(told) if len(told) > 1 else ""


def differences(call: str, members: Sequence[int], told: Sequence[tuple[Terms, str]]) -> str:
    """Say what differs between ranks, by rank and value, and where they made the call.

    >>> told = [((("dtype", "int32"),), "a.py:3"), ((("dtype", "int64"),), "a.py:3")]
    >>> print(differences("allreduce 'x'", [0, 1], told))
    allreduce 'x' needs the same dtype on every rank, but rank 0 has int32, rank 1 has int64.
    """
    lines = []
    columns = [dict(terms) for terms, _ in told]
    for word in dict.fromkeys(word for column in columns for word in column):
        values = [column.get(word) for column in columns]
        if any(value != values[0] for value in values):
            have = ", ".join(
                f"rank {rank} has {_plain(value)}"
                for rank, value in zip(members, values, strict=True)
            )
            lines.append(f"{call} needs the same {word} on every rank, but {have}.")
    if where := lines_told(members, [line for _, line in told]):
        lines.append(
            f"It was called by {where}. Calls without a name pair up by their number, so a rank "
            f"that makes one more shifts all that follow: give them name=."
        )
    return "\n".join(lines)


def kinds_differ(name: str, members: Sequence[int], told: Sequence[tuple[str, str]]) -> str:
    """Say that ranks wait for one name as different operations, and where each does.

    >>> print(kinds_differ("x", [0, 1], [("allreduce", "a.py:3"), ("allgather", "a.py:5")]))
    'x' is not one operation: rank 0 waits for allreduce at a.py:3, rank 1 waits for allgather at \
a.py:5. Call the same one on every rank, or give each a name of its own.
    """
    waits = ", ".join(
        f"rank {rank} waits for {kind} at {line or 'an unknown line'}"
        for rank, (kind, line) in zip(members, told, strict=True)
    )
    return (
        f"{name!r} is not one operation: {waits}. Call the same one on every rank, or give each a "
        f"name of its own."
    )


def _plain(value: Any) -> Any:
    """Show what one tensor has without the list of tensors around it."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value
