"""What calls do with memory, of the host or of a device: make it, copy it, and tell it apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from roundelay import _core
from roundelay.engines import DeviceArray
from roundelay.errors import InvalidArgumentError, NoRoomError
from roundelay.reductions import Array

__all__ = [
    "Memory",
    "apart",
    "contiguous",
    "folded",
    "is_block",
    "new",
    "overlap",
    "private",
    "require_host",
    "same",
]

#: An array, or a DeviceArray, which to calls is the same; only engines for devices look closer.
Memory: TypeAlias = Any
#: How long numpy looks for an element that two arrays share, in its own unit: 0.2 ms at most.
MAX_WORK = 10_000


def contiguous(array: Memory) -> Memory:
    """Return the same elements in contiguous memory: the array itself, or a copy beside it."""
    if isinstance(array, DeviceArray):
        return array.contiguous()
    try:
        return np.ascontiguousarray(array)
    except MemoryError:
        raise NoRoomError(array.nbytes, _core.available_memory()) from None


def overlap(one: Memory, other: Memory) -> bool:
    """Tell whether two arrays have memory in common; where that is hard to tell, if they may."""
    if isinstance(one, DeviceArray) or isinstance(other, DeviceArray):
        if not (isinstance(one, DeviceArray) and isinstance(other, DeviceArray)):
            return False
        if not one.is_beside(other):
            return False
        one, other = one.place(), other.place()
    if not np.may_share_memory(one, other):  # by the bounds, which is quick
        return False
    if one.flags.c_contiguous and other.flags.c_contiguous:
        return True
    return np.may_share_memory(one, other, max_work=MAX_WORK)  # type: ignore[arg-type] # any number


def apart(given: Memory, written: Memory) -> Memory:
    """Return what is given in memory that is not written meanwhile: itself, or a copy."""
    if not overlap(given, written):
        return given
    try:
        return given.copy()
    except MemoryError:
        raise NoRoomError(given.nbytes, _core.available_memory()) from None


def same(one: Memory, other: Memory) -> bool:
    """Tell whether two arrays are the same memory, element by element."""
    places = [(_address(each), each.strides, each.shape) for each in (one, other)]
    return places[0] == places[1]


def is_block(part: Memory, whole: Memory, number: int) -> bool:
    """Tell whether `part` is block `number` of `whole`, one after the other in memory."""
    one_after_the_other = all(
        isinstance(each, np.ndarray) and each.flags.c_contiguous for each in (part, whole)
    )
    return one_after_the_other and _address(part) == _address(whole) + number * part.nbytes


def _address(array: Memory) -> int:
    return array.address if isinstance(array, DeviceArray) else int(array.ctypes.data)


def new(call: str, array: Memory, shape: Sequence[int]) -> Memory:
    """Return new memory of the same dtype, on the same device."""
    if isinstance(array, DeviceArray):
        return array.new(tuple(shape))
    return private(call, shape, array.dtype)


def private(call: str, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return new memory of this process alone, or say how much there is not."""
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError, OverflowError):  # too much, or more than a number can say
        raise NoRoomError(
            math.prod(shape) * dtype.itemsize, _core.available_memory(), call
        ) from None


def require_host(call: str, arrays: Sequence[Memory]) -> None:
    """Refuse memory of a device, for engines that work on the host's."""
    for array in arrays:
        if isinstance(array, DeviceArray):
            raise InvalidArgumentError(
                f"{call} got a tensor on {array.tensor.device}; this engine works on CPU memory. "
                f"Pass tensor.cpu(), or use an engine for that device: rd.init(engine='nccl')."
            )


def folded(array: Memory) -> bool:
    """Tell whether elements may lie in the same place: a stride steps into what it should pass."""
    reach = 1 if isinstance(array, DeviceArray) else array.itemsize
    steps = [(abs(step), n) for step, n in zip(array.strides, array.shape, strict=True) if n > 1]
    for step, n in sorted(steps):
        if step < reach:
            return bool(array.size > 0)
        reach += (n - 1) * step
    return False
