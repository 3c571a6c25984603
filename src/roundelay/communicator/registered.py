"""Arrays that exist already, moved to where collectives need no copy: `register`, `unregister`."""

from __future__ import annotations

import sys
import weakref
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from roundelay import _core
from roundelay.arguments import shown
from roundelay.communicator.buffers import bind
from roundelay.communicator.memory import require_host
from roundelay.engines import Engine, OwnedMemory
from roundelay.errors import InvalidArgumentError
from roundelay.reductions import Array

__all__ = ["LEAST", "RegisterCalls"]

#: Bytes from which collectives use the arena: smaller arrays have nothing to gain, and stay.
LEAST = 32 * 1024


class RegisterCalls(ABC):
    """The part of a communicator that moves arrays into the arena."""

    _engine: Engine

    def register(self, x: Any) -> int:  # Any: arrays of every kind, and what holds them
        """Move the memory of arrays into the arena: they keep their address and all their views.

        From then on they are as fast as arrays of `empty`, if those of all ranks are. Takes an
        array, a CPU tensor, an iterable or a mapping of those, or a module: its parameters and
        buffers. A view stands for all of the array that it is a view of. Each rank may call it
        when it likes. Nobody may write to the arrays meanwhile.

        Returns how many bytes of them lie in the arena now; 0 on engines that have none. Arrays
        below 32 KiB stay where they are. If one can't move it is refused, and none has moved.
        """
        arena = self._engine.arena()
        memories: dict[int, OwnedMemory] = {}
        inside = 0
        for name, one in _arrays("register", x):
            array = self._host_array(f"register of {name}", one)
            start, nbytes = _span(array)
            if arena is None or nbytes == 0:
                continue
            if arena.holds(start, nbytes):
                inside += nbytes
                continue
            memory = _memory_of(name, one)
            if memory.nbytes >= LEAST:
                memories[memory.address] = memory
        if arena is not None:
            arena.move_in(list(memories.values()))
        return inside + sum(memory.nbytes for memory in memories.values())

    def unregister(self, x: Any) -> int:  # Any: likewise
        """Give arrays memory of their own again, at the same address; return how many bytes.

        That happens by itself when an array goes. What is not registered stays as it is.
        """
        arena = self._engine.arena(closed=True)
        memories = []
        for name, one in _arrays("unregister", x):
            start, nbytes = _span(self._host_array(f"unregister of {name}", one))
            memories.append(OwnedMemory(name, start, nbytes, one, may_move=False))
        return 0 if arena is None else arena.move_out([one for one in memories if one.nbytes])

    def _host_array(self, call: str, given: Any) -> Array:
        array = bind(call, given).array
        if not self._engine.devices:
            require_host(call, [array])
        return array


def _arrays(call: str, x: Any) -> Iterator[tuple[str, Any]]:
    """Yield arrays and tensors with the names that a message calls them by."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.nn.Module):
        yield from x.named_parameters()
        yield from x.named_buffers()
    elif isinstance(x, np.ndarray) or (torch is not None and isinstance(x, torch.Tensor)):
        yield "x", x
    elif isinstance(x, Mapping):
        yield from ((f"x[{key!r}]", one) for key, one in x.items())
    elif isinstance(x, Iterable) and not isinstance(x, str | bytes | bytearray | memoryview):
        for number, one in enumerate(x):
            for name, array in _arrays(call, one):
                yield f"x[{number}]" + name.removeprefix("x"), array
    else:
        raise InvalidArgumentError(
            f"{call} takes numpy arrays, CPU tensors, iterables and mappings of those, and "
            f"modules, not {shown(x)}. New memory is to be had from comm.empty()."
        )


def _span(array: Any) -> tuple[int, int]:  # Any: DeviceArray, which has none here
    """Return where an array's memory begins, and how many bytes it goes over."""
    if not isinstance(array, np.ndarray) or array.size == 0:
        return 0, 0
    steps = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    before = sum(step for step in steps if step < 0)
    after = sum(step for step in steps if step > 0)
    return int(array.ctypes.data) + before, after - before + array.itemsize


def _memory_of(name: str, given: Any) -> OwnedMemory:
    """Find whose memory it is, all of it; refuse what nobody tells the end of."""
    owner = given
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, np.ndarray) and owner.flags.owndata:
        return OwnedMemory(name, *_span(owner), owner, may_move=False)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(owner, torch.Tensor):
        raise InvalidArgumentError(
            f"register can't move {name}: its memory belongs to a {type(owner).__name__}, not to "
            f"numpy or torch. Copy it to an array of comm.empty()."
        )
    if owner.is_pinned():
        raise InvalidArgumentError(
            f"register can't move {name}: it is pinned, so that a device knows its pages. Register "
            f"it before it is pinned, or pin an array of comm.empty()."
        )
    if not _dies_in_time() or not _core.Registration.can_look():
        raise InvalidArgumentError(
            f"register can't move {name}: with torch {torch.__version__} on this kernel nobody "
            f"tells when its memory goes. Take it from comm.empty() or rd.arena_arrays()."
        )
    storage = owner.untyped_storage()
    return OwnedMemory(name, storage.data_ptr(), storage.nbytes(), storage, may_move=True)


@cache
def _dies_in_time() -> bool:
    """Tell whether torch lets go of a storage's memory after the end of the storage is heard of.

    Older ones free it first, and by then it may be another's.
    """
    torch = sys.modules["torch"]
    order: list[str] = []
    array = np.zeros(1)
    tensor = torch.from_numpy(array)
    heard = (
        weakref.ref(array, lambda _: order.append("memory")),
        weakref.ref(tensor.untyped_storage(), lambda _: order.append("storage")),
    )
    del array, tensor
    del heard
    return order == ["storage", "memory"]
