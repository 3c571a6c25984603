"""Calls whose float32 travels as bfloat16, for engines and phases that do not round themselves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from roundelay import _core
from roundelay.engines._call import CollectiveCall
from roundelay.errors import NoRoomError
from roundelay.reductions import Array

__all__ = ["NARROW", "narrow", "narrowed", "widen"]

#: What holds bfloat16 where numpy has none.
NARROW = np.dtype(np.uint16)
#: Returns so many bytes that the engine reaches best, or raises `NoRoomError`.
Memory = Callable[[int], Array]
#: From here on memory that is kept for the next call is worth asking for.
KEPT_FROM = 32 * 1024


def narrow(array: Array, into: Array) -> Array:
    """Round float32 to bfloat16, and return where it is."""
    _core.to_bfloat16(into, array)
    return into


def widen(array: Array, into: Array) -> None:
    """Write bfloat16 as float32."""
    _core.from_bfloat16(into, array)


def narrowed(call: CollectiveCall, memory: Memory) -> CollectiveCall:
    """Return a wide call in memory of its own, rounded; any other as it is."""
    if not call.wide:
        return call
    given = _room(call, call.input, memory)
    in_place = call.input is call.output
    output = given if in_place else _room(call, call.output, memory)
    if given is not None and call.input is not None:
        narrow(call.input, given)

    def widened() -> Any:
        if output is not None and call.output is not None:
            widen(output, call.output)
        return call.finish()

    return replace(call, input=given, output=output, finish=widened, wide=False)


def _room(call: CollectiveCall, array: Array | None, memory: Memory) -> Array | None:
    """Return room for as many elements of bfloat16."""
    if array is None:
        return None
    if 2 * array.size >= KEPT_FROM:
        with contextlib.suppress(NoRoomError):
            # Few sizes are kept. The memory goes back when nothing is seen of it any more, which
            # numpy forgets of an array whose views it keeps, and does not of a memoryview.
            kept = memory(1 << (2 * array.size - 1).bit_length()).data
            return np.frombuffer(kept, NARROW, array.size).reshape(array.shape)
    try:
        return np.empty(array.shape, NARROW)
    except MemoryError:
        nbytes = math.prod(array.shape) * NARROW.itemsize
        raise NoRoomError(nbytes, _core.available_memory(), call.collective) from None
