"""The memory that the ranks of one host share."""

from __future__ import annotations

from roundelay import _core
from roundelay.errors import NoRoomError

__all__ = ["make_world"]


def make_world(size: int) -> _core.World:
    """Return the shared memory of `size` ranks, or say how much it would take."""
    try:
        return _core.World.create(size)
    except _core.OutOfMemory:
        needed, available = _core.World.bytes_for(size), _core.available_memory()
        raise NoRoomError(needed, available, f"a job of {size} ranks") from None
