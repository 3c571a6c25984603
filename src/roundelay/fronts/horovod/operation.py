"""A named operation: what one rank submits, and waits for."""

from __future__ import annotations

import hashlib
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from functools import lru_cache
from time import monotonic
from typing import Any

from roundelay.communicator import Communicator

__all__ = ["ALLREDUCE", "BARRIER", "KINDS", "Operation", "Terms", "differences", "number_of"]

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


class Operation:
    """What a rank submits; done once it has run, or failed, on all members of its process set."""

    __slots__ = (
        "_done",
        "_ended",
        "_error",
        "_result",
        "key",
        "kind",
        "name",
        "process_set",
        "run",
        "terms",
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
def number_of(thing: str | Terms) -> int:
    """Return a number that stands for a name, or for terms, on every rank alike."""
    digest = hashlib.blake2b(repr(thing).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def differences(call: str, members: Sequence[int], told: Sequence[Terms]) -> str:
    """Say what differs between ranks, by rank and value.

    >>> print(differences("allreduce 'x'", [0, 1], [(("dtype", "int32"),), (("dtype", "int64"),)]))
    allreduce 'x' needs the same dtype on every rank, but rank 0 has int32, rank 1 has int64.
    """
    lines = []
    columns = [dict(terms) for terms in told]
    for word in dict.fromkeys(word for column in columns for word in column):
        values = [column.get(word) for column in columns]
        if any(value != values[0] for value in values):
            have = ", ".join(
                f"rank {rank} has {_plain(value)}"
                for rank, value in zip(members, values, strict=True)
            )
            lines.append(f"{call} needs the same {word} on every rank, but {have}.")
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    """Show what one tensor has without the list of tensors around it."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value
