"""Memory that calls of one communicator use one after the other, where ranks read it in place.

What a call packs and unpacks is needed for that call only. Memory made anew each time costs more
than what is written to it, in pages that the system clears.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import RLock
from typing import Self

import torch

from roundelay.communicator import Communicator
from roundelay.communicator.buffers import fresh

__all__ = ["Scratch", "large", "scratch_of"]


class Scratch:
    """Buffers by name, which grow and are kept; whoever uses them holds the lock."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._lock = comm, RLock()
        self._buffers: dict[str, torch.Tensor] = {}

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
        length = math.prod(row)
        nbytes = most * length * like.element_size()
        held = self._buffers.get(name)
        if held is None or len(held) < nbytes:
            self._buffers.pop(name, None)
            room = 1 << max(nbytes - 1, 0).bit_length()  # pages that nobody writes take no memory
            held = self._buffers[name] = torch.from_numpy(self._comm.empty(room, "uint8"))
        return held[:nbytes].view(like.dtype)[: used * length].view(used, *row)


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
