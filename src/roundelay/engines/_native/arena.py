"""Existing memory in the arena: what can move there with its address, and how it comes back."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from roundelay import _core
from roundelay.engines._call import OwnedMemory
from roundelay.errors import InvalidArgumentError, NoRoomError

if TYPE_CHECKING:
    from roundelay.engines._native.engine import NativeEngine

__all__ = ["NativeArena"]

PAGE = 4096  # or more; the native core asks the system


class _Mapping(NamedTuple):
    """A line of /proc/self/maps: addresses, what they are for, and which file lies there."""

    start: int
    end: int
    permissions: str
    inode: str
    path: str


class NativeArena:
    """The arena of a world, and what one rank has moved into it. It goes when its owner does."""

    def __init__(self, engine: weakref.ref[NativeEngine], world: _core.World) -> None:
        self._engine, self._world = engine, world
        self._finalizers: dict[int, weakref.finalize[[_core.Registration], object]] = {}

    def holds(self, address: int, nbytes: int) -> bool:
        """Tell whether memory lies in the arena, by whatever way it came there."""
        found = _core.Registration.find(address, nbytes)
        return self._world.holds(address) or (found is not None and found.is_in(self._world))

    def move_in(self, memories: Sequence[OwnedMemory]) -> None:
        """Move all of them, or none."""
        engine = self._engine()
        if self._world.troubled and engine is not None:
            raise engine.trouble()
        # Where ranks are threads another may be at the same array. What had moved when these were
        # read is known by now, and passed over; what moves later still looks as it was.
        mappings = _mappings() if memories else []
        wanted = [one for one in memories if not self.holds(one.address, one.nbytes)]
        for one in wanted:
            self._refuse_unmovable(one, mappings)
        moved: list[_core.Registration] = []
        try:
            for one in wanted:
                moved.append(self._move(one))  # noqa: PERF401 - what was moved before an error counts
        except (_core.OutOfMemory, _core.Broken) as error:
            for registration in moved:
                registration.release()
            if isinstance(error, _core.Broken) and engine is not None:
                raise engine.trouble() from None
            nbytes = sum(map(attrgetter("nbytes"), wanted))
            raise NoRoomError(nbytes, _core.available_memory(), "register") from None

    def _refuse_unmovable(self, one: OwnedMemory, mappings: list[_Mapping]) -> None:
        """Refuse pages that are not this process's alone: a file's, a device's, or shared ones."""
        found = _core.Registration.find(one.address, one.nbytes)
        if found is not None and not found.is_in(self._world):
            raise InvalidArgumentError(
                f"register can't move {one.name}: it is registered in the arena of another job. "
                f"Unregister it there first."
            )
        starts = [each.start for each in mappings]
        at = -(-one.address // PAGE) * PAGE
        end = (one.address + one.nbytes) // PAGE * PAGE
        while at < end:
            place = bisect_right(starts, at) - 1
            here = mappings[place] if place >= 0 and mappings[place].end > at else None
            if here is None or here.permissions[:2] != "rw" or here.permissions[3] != "p" \
                    or here.inode != "0":  # fmt: skip
                what = "nothing" if here is None else here.path or "shared memory"
                raise InvalidArgumentError(
                    f"register can't move {one.name}: its memory is not ordinary memory of this "
                    f"process alone, but {what}. Copy it to an array of comm.empty()."
                )
            at = here.end

    def numpy_handler(self, least: int) -> object:
        """Return one that takes blocks of the arena."""
        return _core.numpy_handler(self._world, least)

    def _move(self, one: OwnedMemory) -> _core.Registration:
        room = _core.Registration.room(one.nbytes)
        block = _core.Block(self._world, self._world.make_block(room, 1), room)
        storage = id(one.owner) if one.may_move else 0
        made = _core.Registration.make(self._world, block, one.address, one.nbytes, storage)
        # Called while the memory is still the owner's: what frees it comes after.
        finalizer = weakref.finalize(one.owner, self._gone, made)
        finalizer.atexit = False
        self._finalizers[one.address] = finalizer
        return made

    def _gone(self, registration: _core.Registration) -> None:
        self._finalizers.pop(registration.address, None)
        with suppress(_core.OutOfMemory):  # or they stay in the arena, whoever gets them next
            registration.release()

    def move_out(self, memories: Sequence[OwnedMemory]) -> int:
        """Give them memory of their own again; return how many bytes that was."""
        released = 0
        for one in memories:
            found = _core.Registration.find(one.address, one.nbytes)
            if found is None:
                continue
            try:
                if not found.release():
                    raise InvalidArgumentError(
                        f"unregister can't move {one.name}: a call on it is under way. Wait for "
                        f"its handle first."
                    )
            except _core.OutOfMemory:
                raise NoRoomError(found.nbytes, _core.available_memory(), "unregister") from None
            released += found.nbytes
            finalizer = self._finalizers.pop(found.address, None)
            if finalizer is not None:
                finalizer.detach()
        return released


def _mappings() -> list[_Mapping]:
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, permissions, _, _, inode, *path = line.split(None, 5)
        start, end = (int(word, 16) for word in addresses.split("-"))
        found.append(_Mapping(start, end, permissions, inode, path[0] if path else ""))
    return found
