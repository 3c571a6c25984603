"""New arrays and CPU tensors that lie in the arena from the start: `rd.arena_arrays`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from roundelay import _core
from roundelay.arguments import shown
from roundelay.communicator._communicator import Communicator
from roundelay.communicator.registered import LEAST
from roundelay.errors import InvalidArgumentError, NoRoomError
from roundelay.reductions import Array

__all__ = ["arena_arrays"]


@contextmanager
def arena_arrays(comm: Communicator) -> Iterator[None]:
    """Have numpy and torch take the memory of new arrays and CPU tensors from the arena.

    From 32 KiB on, and on this thread; other ranks need not. The arrays last as long as any, and
    are as fast as those of `comm.empty`. Engines without an arena let numpy and torch be.

    >>> import roundelay as rd
    >>> def work(comm):
    ...     with rd.arena_arrays(comm):
    ...         x = np.ones((128, 128))
    ...     return comm.all_reduce(x)[0, 0]
    >>> rd.run(work, 3, "threads")
    [np.float64(3.0), np.float64(3.0), np.float64(3.0)]
    """
    if not isinstance(comm, Communicator):
        raise InvalidArgumentError(
            f"arena_arrays needs a communicator, that of rd.init() or rd.run, not {shown(comm)}."
        )
    arena = comm._engine.arena()
    if arena is None:
        yield
        return
    handler = arena.numpy_handler(LEAST)
    torch = sys.modules.get("torch")
    before = _core.set_numpy_handler(handler)
    try:
        with nullcontext() if torch is None else _tensor_mode()(handler):
            yield
    finally:
        _core.set_numpy_handler(before)


def _bytes(handler: object, nbytes: int) -> Array:
    before = _core.set_numpy_handler(handler)
    try:
        return np.empty(nbytes, np.uint8)
    except MemoryError:
        raise NoRoomError(nbytes, _core.available_memory(), "arena_arrays") from None
    finally:
        _core.set_numpy_handler(before)


@cache
def _tensor_mode() -> type[Any]:  # Any: a class of torch's, which is not there before torch is
    """Make the mode in which what torch's operators return anew is put into the arena."""
    torch: Any = sys.modules["torch"]
    mode: Any = torch.utils._python_dispatch.TorchDispatchMode
    fresh = torch.ops.aten.lift_fresh.default  # what torch.tensor(…) has made of numbers

    class ArenaTensors(mode):  # type: ignore[misc] # torch is looked up, not imported
        def __init__(self, handler: object) -> None:
            super().__init__()
            self._handler = handler

        def __torch_dispatch__(
            self,
            func: Any,
            types: Sequence[type],
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            there = func._schema.is_mutable or any(one.alias_info for one in func._schema.returns)
            if there and func is not fresh:
                return made  # what it returns was there before
            return torch.utils._pytree.tree_map_only(torch.Tensor, self._put, made)

        def _put(self, tensor: Any) -> Any:
            """Return the same tensor in the arena: nobody else has it yet."""
            plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
            if not plain or tensor.device.type != "cpu" or tensor.is_quantized:
                return tensor
            storage = tensor.untyped_storage()
            if storage.nbytes() < LEAST or storage.is_shared() or tensor.is_pinned():
                return tensor
            memory = torch.from_numpy(_bytes(self._handler, storage.nbytes())).untyped_storage()
            memory.copy_(storage)
            where = tensor.storage_offset(), tensor.size(), tensor.stride()
            return torch.empty(0, dtype=tensor.dtype).set_(memory, *where)

    return ArenaTensors
