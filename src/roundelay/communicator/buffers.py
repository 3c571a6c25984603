"""Arrays of every kind seen as numpy arrays, and results handed back as the kind that came in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from roundelay import _core
from roundelay.engines._device_arrays import DeviceArray
from roundelay.engines._native import DTYPES
from roundelay.errors import InvalidArgumentError
from roundelay.reductions import Array, Located

__all__ = [
    "CODES",
    "DTYPES",
    "Bound",
    "bind",
    "contiguous",
    "is_block",
    "like",
    "overlap",
    "require_host",
    "same",
    "unseen",
    "view",
]

#: Calls that have a twin for Python objects.
OF_OBJECTS = ("all_gather", "broadcast", "gather", "recv", "scatter", "send")
#: An array, or a DeviceArray, which to jobs is the same; only engines for devices look closer.
Memory: TypeAlias = Any
CODES = {name: code for code, name in enumerate(DTYPES)}
#: Where tensors lie that numpy sees; all others are left to engines for their device.
HOST = ["cpu"]
#: numpy finds a dtype's name slowly, and a dtype in a dict at once.
NAMES = {np.dtype(name): name for name in DTYPES if name != "bfloat16"}


@dataclass(slots=True)  # not frozen: one is made per call, and freezing costs most of that
class Bound:
    """A caller's buffer: its memory as a numpy array, its dtype by name, and how to hand it back.

    numpy has no bfloat16, so such memory is an array of uint16 here and `dtype` says what it is.
    """

    array: Array
    dtype: str
    wrap: Callable[[Array], Any]  # an array like `array` as the caller's kind
    given: Any  # what the caller passed
    touched: Callable[[], None]  # to be called when `array` was written

    @property
    def code(self) -> int:
        """The dtype's number in the native core."""
        return CODES[self.dtype]

    def require_writable(self, call: str, word: str) -> None:
        """Refuse a buffer that the call must write and can't."""
        if not self.array.flags.writeable:
            raise InvalidArgumentError(
                f"{call} must write its {word}, but that is read-only. Pass out= or a copy."
            )


def bind(call: str, given: Any) -> Bound:
    """Look at a numpy array, a CPU tensor, or anything with the buffer protocol or DLPack."""
    if isinstance(given, np.ndarray):
        return _bind_array(call, given, given, lambda array: array)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        return _bind_tensor(call, given, torch)
    if isinstance(given, Located):
        raise InvalidArgumentError(f"{call} takes Located only with op='maxloc' or op='minloc'.")
    try:
        array = np.asarray(memoryview(given))
    except TypeError:
        if not hasattr(given, "__dlpack__"):
            way = f" For Python objects there is {call}_object." if call in OF_OBJECTS else ""
            raise InvalidArgumentError(
                f"{call} takes numpy arrays, CPU tensors and objects with the buffer protocol or "
                f"DLPack, not {type(given).__name__}.{way}"
            ) from None
        array = np.from_dlpack(given)
    return _bind_array(call, array, given, lambda array: array)


def _bind_array(call: str, array: Array, given: Any, wrap: Callable[[Array], Any]) -> Bound:
    name = NAMES.get(array.dtype) or ("bfloat16" if array.dtype.name == "bfloat16" else "")
    if not name:
        raise InvalidArgumentError(
            f"{call} does not take dtype {array.dtype}; it takes {', '.join(DTYPES)}."
        )
    if name == "bfloat16":  # of ml_dtypes
        kind = array.dtype
        array = array.view(np.uint16)
        return Bound(array, name, lambda made: made.view(kind), given, _untouched)
    return Bound(array, name, wrap, given, _untouched)


def _bind_tensor(call: str, tensor: Any, torch: Any) -> Bound:
    if tensor.is_conj() or tensor.is_neg() or tensor.layout is not torch.strided:
        raise InvalidArgumentError(
            f"{call} needs a plain dense tensor; pass tensor.resolve_conj().resolve_neg() or "
            f"tensor.to_dense()."
        )
    plain = tensor.detach()

    def touched() -> None:
        torch.autograd.graph.increment_version(tensor)

    if tensor.device.type not in HOST:
        return _bind_on_device(call, plain, tensor, touched)
    if tensor.dtype is torch.bfloat16:
        array = plain.view(torch.uint16).numpy()
        return Bound(
            array,
            "bfloat16",
            lambda made: torch.from_numpy(made).view(torch.bfloat16),
            tensor,
            touched,
        )
    try:
        array = plain.numpy()
    except TypeError:
        raise InvalidArgumentError(f"{call} does not take dtype {tensor.dtype}.") from None
    found = _bind_array(call, array, tensor, torch.from_numpy)
    return Bound(found.array, found.dtype, found.wrap, tensor, touched)


def _bind_on_device(call: str, plain: Any, tensor: Any, touched: Callable[[], None]) -> Bound:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in CODES:
        raise InvalidArgumentError(f"{call} does not take dtype {tensor.dtype}.")
    array = DeviceArray(plain, np.dtype("uint16" if name == "bfloat16" else name))

    def wrap(made: Any) -> Any:  # an array of either kind
        if not isinstance(made, DeviceArray):
            on_host, made = made, array.new(made.shape)
            made[...] = on_host
        return made.tensor

    shown: Memory = array
    return Bound(shown, name, wrap, tensor, touched)


def _untouched() -> None:
    """Nobody keeps count of writes to a numpy array."""


def contiguous(array: Memory) -> Memory:
    """Return the same elements in contiguous memory: the array itself, or a copy beside it."""
    return array.contiguous() if isinstance(array, DeviceArray) else np.ascontiguousarray(array)


def overlap(one: Memory, other: Memory) -> bool:
    """Tell whether two arrays may have memory in common."""
    if isinstance(one, DeviceArray) and isinstance(other, DeviceArray):
        return one.overlaps(other)
    if isinstance(one, DeviceArray) or isinstance(other, DeviceArray):
        return False
    return np.may_share_memory(one, other)


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


def like(bound: Bound, shape: Sequence[int]) -> Memory:
    """Return new memory of the same dtype, on the same device."""
    array: Memory = bound.array
    if isinstance(array, DeviceArray):
        return array.new(tuple(shape))
    return np.empty(shape, dtype=array.dtype)


def require_host(call: str, arrays: Sequence[Memory]) -> None:
    """Refuse memory of a device, for engines that work on the host's."""
    for array in arrays:
        if isinstance(array, DeviceArray):
            raise InvalidArgumentError(
                f"{call} got a tensor on {array.tensor.device}; this engine works on CPU memory. "
                f"Pass tensor.cpu(), or use an engine for that device: rd.init(engine='nccl')."
            )


def unseen(call: str, dtype: str) -> Bound:
    """Stand in for a buffer that this rank does not have, of a dtype that another rank told."""
    if dtype != "bfloat16":
        return Bound(np.empty(0, dtype), dtype, lambda array: array, None, _untouched)
    kind = getattr(sys.modules.get("ml_dtypes"), "bfloat16", None)
    if kind is None:
        raise InvalidArgumentError(
            f"{call}: the root has bfloat16, which numpy has not. Pass out= on every rank."
        )
    return _bind_array(call, np.empty(0, kind), None, lambda array: array)


def view(array: Array) -> _core.View:
    """Return the native view of contiguous memory; pairs of value and location are bytes to it."""
    return _core.View(array if array.dtype.names is None else array.view(np.uint8))
