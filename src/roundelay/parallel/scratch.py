"""Memory that calls of one communicator use one after the other, where ranks read it in place.

What a call packs and unpacks is needed for that call only. Memory made anew each time costs more
than what is written to it, in pages that the system clears.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import RLock
from typing import Any, Self

import torch

from roundelay.communicator import Communicator
from roundelay.communicator.buffers import fresh

__all__ = ["Scratch", "large", "plain", "scratch_of"]

ARRAYS = frozenset({torch.float16, torch.float32, torch.float64, torch.int32, torch.int64})


class Scratch:
    """Buffers by name, which grow and are kept; whoever uses them holds the lock."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._lock = comm, RLock()
        self._buffers: dict[str, torch.Tensor] = {}
        self._rows: dict[tuple[str, torch.dtype, torch.Size], torch.Tensor] = {}

    def __enter__(self) -> Self:
        """Have the buffers until the end of the block."""
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        """Let others have them."""
        self._lock.release()

    def rows(self, name: str, most: int, used: int, like: torch.Tensor) -> torch.Tensor:
        """Return `used` rows such as `like` has; `most` is alike on all ranks, and as many or more.

        In the arena, or on the device.
        """
        row = like.shape[1:]
        if like.device.type != "cpu":
            return like.new_empty(used, *row)
        key = (name, like.dtype, row)
        rows = self._rows.get(key)
        if rows is None or len(rows) < most:
            rows = self._rows[key] = self._made(name, most, like)
        return rows[:used]

    def _made(self, name: str, most: int, like: torch.Tensor) -> torch.Tensor:
        """Return at least so many rows of a buffer, which is made larger if it must be."""
        row = math.prod(like.shape[1:]) * like.element_size()
        held = self._buffers.get(name)
        if held is None or len(held) < most * row:
            self._buffers.pop(name, None)
            self._rows = {key: rows for key, rows in self._rows.items() if key[0] != name}
            room = 1 << max(most * row - 1, 0).bit_length()  # pages nobody writes take no memory
            held = self._buffers[name] = torch.from_numpy(self._comm.empty(room, "uint8"))
        most = len(held) // row if row else most
        return held[: most * row].view(like.dtype).view(most, *like.shape[1:])


def scratch_of(comm: Communicator) -> Scratch:
    """Return the buffers of a communicator; they go when it goes."""
    found: Scratch | None = vars(comm).get("scratch")
    if found is None:
        found = vars(comm)["scratch"] = Scratch(comm)
    return found


def large(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return new memory of a tensor's dtype and device; on the host, of large pages."""
    made = fresh("large", like, shape) if like.device.type == "cpu" else None
    return like.new_empty(tuple(shape)) if made is None else made


def plain(data: torch.Tensor) -> Any:
    """Return a tensor as an array where it can be one, of which a call asks less.

    For what is known to fit: others wait while a call is made ready.
    """
    return data.numpy() if data.is_cpu and data.dtype in ARRAYS else data
