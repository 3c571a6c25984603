"""Memory in the arena for one rank alone: taken when asked for, and kept for the next who asks."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict

import numpy as np

from roundelay import _core
from roundelay.errors import NoRoomError
from roundelay.reductions import Array


class Pool:
    """Blocks of the arena by size. Other ranks can reach them, as all of the arena.

    Nobody else need call it, so ranks may ask for different sizes at different times. What nobody
    refers to any more is given out again, as it was left: to get it from the kernel anew, page by
    page and zeroed, would take as long as a collective on it.
    """

    def __init__(self, world: _core.World) -> None:
        self._world = world
        self._free: defaultdict[int, list[_core.Block]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Array:
        """Return bytes whose contents are whatever they are."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        with self._lock:
            free = self._free[nbytes]
            block = free.pop() if free else None
        if block is None:
            try:
                block = _core.Block(self._world, self._world.make_block(nbytes, 1), nbytes)
            except _core.OutOfMemory:
                raise NoRoomError(nbytes) from None
        found: Array = block.bytes(0, nbytes)
        weakref.finalize(found, free.append, block).atexit = False
        return found
