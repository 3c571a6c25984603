"""Python objects between ranks, exactly as they were; pickle only when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from roundelay.arguments import shown
from roundelay.communicator.calls import ArrayCalls
from roundelay.communicator.point_to_point import PointToPoint
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, rank_count
from roundelay.processes.wire import decode, encode
from roundelay.reductions import Array

__all__ = ["ObjectCalls"]

OBJECT = 0x726F756E64656C61  # says that an object follows


class ObjectCalls(ArrayCalls, PointToPoint):
    """The part of a communicator that carries Python objects."""

    _objects_sent: Iterator[int]  # numbers of objects, each of which is used once

    def broadcast_object(self, thing: Any, root: int = 0, *, allow_pickle: bool = False) -> Any:
        """Return the root's object on every rank."""
        root = self._build.check_root("broadcast_object", root)
        data = encode(thing, allow_pickle=allow_pickle) if self.rank == root else b""
        call = "broadcast_object"
        length = self._broadcast_for(call, np.array([len(data)], np.int64), root)
        buffer = (
            np.frombuffer(data, np.uint8).copy() if data else np.empty(int(length[0]), np.uint8)
        )
        self._broadcast_for(call, buffer, root)
        return thing if self.rank == root else decode(buffer.tobytes(), allow_pickle=allow_pickle)

    def all_gather_object(self, thing: Any, *, allow_pickle: bool = False) -> list[Any]:
        """Return everybody's object, in rank order, on every rank."""
        call, data = "all_gather_object", _bytes(thing, allow_pickle=allow_pickle)
        counts = self._all_gather_for(call, np.array([len(data)], np.int64))[:, 0].tolist()
        joined = self._all_gather_for(call, data, counts)
        return _cut(joined, counts, allow_pickle=allow_pickle)

    def gather_object(
        self, thing: Any, root: int = 0, *, allow_pickle: bool = False
    ) -> list[Any] | None:
        """Return everybody's object, in rank order, at the root; None elsewhere."""
        root = self._build.check_root("gather_object", root)
        call, data = "gather_object", _bytes(thing, allow_pickle=allow_pickle)
        counts = self._all_gather_for(call, np.array([len(data)], np.int64))[:, 0].tolist()
        joined = self._gather_for(call, data, root, counts)
        return None if joined is None else _cut(joined, counts, allow_pickle=allow_pickle)

    def scatter_object(
        self, things: Sequence[Any] | None, root: int = 0, *, allow_pickle: bool = False
    ) -> Any:
        """Return the r-th of the root's objects on rank r."""
        root = self._build.check_root("scatter_object", root)
        parts = []
        if self.rank == root:
            if things is None or _length(things) != self.size:
                raise InvalidArgumentError(
                    f"scatter_object on {rank_count(self.size)} needs a list of {self.size} "
                    f"objects at the root, not {shown(things)}."
                )
            parts = [encode(thing, allow_pickle=allow_pickle) for thing in things]
        width = np.array([max(map(len, parts), default=0)], np.int64)
        self._broadcast_for("scatter_object", width, root)
        rows = np.zeros((self.size, int(width[0]) + 8), np.uint8)
        for row, part in zip(rows, parts, strict=False):
            row[:8] = np.frombuffer(len(part).to_bytes(8, "little"), np.uint8)
            row[8 : 8 + len(part)] = np.frombuffer(part, np.uint8)
        mine = self.scatter(rows if self.rank == root else None, root).tobytes()
        length = int.from_bytes(mine[:8], "little")
        return decode(mine[8 : 8 + length], allow_pickle=allow_pickle)

    def send_object(
        self, thing: Any, dst: int, tag: int = 0, *, allow_pickle: bool = False
    ) -> None:
        """Send an object: a head with its length and number, then its bytes."""
        data = _bytes(thing, allow_pickle=allow_pickle)
        number = next(self._objects_sent)
        head = np.array([OBJECT, len(data), number], np.int64)
        self._post(head, dst, tag, sends=True, background=False).wait()
        self._post(data, dst, number, sends=True, background=False, inner=True).wait()

    def recv_object(self, src: Any, tag: Any = 0, *, allow_pickle: bool = False) -> Any:
        """Return the next object from `src` with this tag; either may be `rd.ANY`."""
        head = np.zeros(3, np.int64)
        came = self._post(head, src, tag, sends=False, background=False)
        came.wait()
        word, length, number = head.tolist()
        if word != OBJECT:
            raise CollectiveMismatch(
                f"recv_object on rank {self.rank} from rank {came.source}, tag {came.tag}: the "
                f"message is an array, int64[3], which was sent by send. It was taken and dropped."
            )
        # By its number, so that no other receive, of whichever thread, can take the rest.
        data = np.empty(length, np.uint8)
        self._post(data, came.source, number, sends=False, background=False, inner=True).wait()
        return decode(data.tobytes(), allow_pickle=allow_pickle)


def _bytes(thing: Any, *, allow_pickle: bool) -> Array:
    return np.frombuffer(encode(thing, allow_pickle=allow_pickle), np.uint8)


def _length(things: Any) -> int | None:
    """Return how many there are; None if that can't be said."""
    try:
        return len(things)
    except (TypeError, ValueError):
        return None


def _cut(joined: Any, counts: Sequence[int], *, allow_pickle: bool) -> list[Any]:
    ends = np.cumsum(counts)
    return [
        decode(joined[end - count : end].tobytes(), allow_pickle=allow_pickle)
        for end, count in zip(ends, counts, strict=True)
    ]
