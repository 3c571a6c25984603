"""Arrays of every kind seen as numpy arrays, and results handed back as the kind that came in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from roundelay import _core
from roundelay.communicator.memory import Memory, folded, private
from roundelay.engines import DeviceArray
from roundelay.errors import InvalidArgumentError
from roundelay.reductions import CODES, DTYPES, Array, Located

__all__ = [
    "Bound",
    "bind",
    "fresh",
    "plain_shape",
    "unseen",
]

#: Calls that have a twin for Python objects.
OF_OBJECTS = ("all_gather", "broadcast", "gather", "recv", "scatter", "send")
#: Where tensors lie that numpy sees; all others are left to engines for their device.
HOST = ["cpu"]
#: DLPack's numbers of memory that the CPU reads, pinned or not; and some that it can't.
ON_HOST = (1, 3, 11)
DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed",
           14: "oneAPI", 15: "WebGPU", 17: "MAIA"}  # fmt: skip
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

    def unchanged(self) -> Any:
        """Return what the caller passed, to which nothing was done."""
        return self.given if self.given is not None else self.wrap(self.array)

    def require_writable(self, call: str, word: str, *, or_out: bool = False) -> None:
        """Refuse a buffer that the call must write and can't; `or_out` if it takes out= instead."""
        if not self.array.flags.writeable:
            way = "out= or a copy" if or_out else "a copy"
            raise InvalidArgumentError(
                f"{call} must write its {word}, but that is read-only. Pass {way}."
            )
        if not self.array.flags.c_contiguous and folded(self.array):
            raise InvalidArgumentError(
                f"{call} must write its {word}, but several elements of that lie in the same "
                f"place, as after expand() or broadcast_to(). Pass a copy."
            )


def bind(call: str, given: Any) -> Bound:
    """Look at a numpy array, a CPU tensor, or anything with the buffer protocol or DLPack."""
    if isinstance(given, np.ndarray):
        if type(given) is not np.ndarray and isinstance(given, np.ma.MaskedArray):
            raise InvalidArgumentError(
                f"{call} knows nothing of masks: pass x.filled(…) or x.data of this masked array."
            )
        return _bind_array(call, given, given, lambda array: array)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        return _bind_tensor(call, given, torch)
    if isinstance(given, Located):
        raise InvalidArgumentError(f"{call} takes Located only with op='maxloc' or op='minloc'.")
    try:
        memory = memoryview(given)
        # Characters of C are bytes, which numpy would take for text.
        array = np.asarray(memory.cast("B") if memory.format in ("c", "<c") else memory)
    except TypeError:
        array = _from_dlpack(call, given)
    except (ValueError, BufferError, NotImplementedError) as error:
        raise InvalidArgumentError(
            f"{call} can't read this {type(given).__name__} as an array: {error}."
        ) from None
    return _bind_array(call, array, given, lambda array: array)


def _from_dlpack(call: str, given: Any) -> Array:
    """Ask for the device first: memory of another one must not be read as the host's."""
    if not hasattr(given, "__dlpack__") or not hasattr(given, "__dlpack_device__"):
        way = f" For Python objects there is {call}_object." if call in OF_OBJECTS else ""
        raise InvalidArgumentError(
            f"{call} takes numpy arrays, CPU tensors and objects with the buffer protocol or "
            f"DLPack, not {type(given).__name__}.{way}"
        )
    try:
        kind = int(given.__dlpack_device__()[0])
        if kind in ON_HOST:
            array: Array = np.from_dlpack(given)
            return array
    except Exception as error:
        raise InvalidArgumentError(
            f"{call} can't read this {type(given).__name__} by DLPack: {error}."
        ) from error
    raise InvalidArgumentError(
        f"{call} got a {type(given).__name__} on a device ({DEVICES.get(kind, kind)}), but by "
        f"DLPack only CPU memory is taken. Copy it to the host first, or pass a torch tensor to "
        f"an engine for its device: rd.init(engine='nccl')."
    )


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
    _check_tensor(call, tensor, torch)
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
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"{call} can't reach the memory of this {type(tensor).__name__}: "
            f"{str(error).partition(chr(10))[0]}"
        ) from None
    found = _bind_array(call, array, tensor, torch.from_numpy)
    return Bound(found.array, found.dtype, found.wrap, tensor, touched)


def _check_tensor(call: str, tensor: Any, torch: Any) -> None:
    """Refuse tensors that are not what lies in their memory, or that reach beyond it."""
    nested = tensor.is_nested
    if nested or tensor.layout is not torch.strided or tensor.is_quantized:
        kind, way = (
            ("nested", "to_padded_tensor(0)") if nested
            else ("quantized", "dequantize()") if tensor.is_quantized
            else (tensor.layout, "to_dense()")
        )  # fmt: skip
        raise InvalidArgumentError(
            f"{call} needs a plain dense tensor, not a {kind} one; pass tensor.{way}."
        )
    if torch._is_functional_tensor(tensor):
        raise InvalidArgumentError(
            f"{call} needs a tensor with memory of its own, not a functionalized one. Make the "
            f"call outside of torch.func.functionalize."
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgumentError(
            f"{call} needs a plain dense tensor; pass tensor.resolve_conj().resolve_neg()."
        )
    if tensor.device.type == "meta":
        raise InvalidArgumentError(
            f"{call} got a tensor on meta, which has no memory. Make it first: "
            f"torch.empty_like(tensor, device='cpu')."
        )
    try:
        held = tensor.untyped_storage().nbytes() // tensor.element_size()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = tensor.storage_offset() + sum((n - 1) * step for n, step in steps) + 1
    except (RuntimeError, NotImplementedError) as error:  # under vmap, or of a compiler
        raise InvalidArgumentError(
            f"{call} needs a tensor with memory of its own: {str(error).partition(chr(10))[0]}"
        ) from None
    if tensor.numel() and reach > held:
        raise InvalidArgumentError(
            f"{call} got a tensor of {reach} elements in a storage that holds {held}: that was "
            f"resized after the tensor was made. Resize it back, or pass a new tensor."
        )


def _bind_on_device(call: str, plain: Any, tensor: Any, touched: Callable[[], None]) -> Bound:
    dtype = _in_numpy(tensor.dtype)
    if dtype is None:
        raise InvalidArgumentError(f"{call} does not take dtype {tensor.dtype}.")
    array, name = DeviceArray(plain, dtype), str(tensor.dtype).removeprefix("torch.")

    def wrap(made: Any) -> Any:  # an array of either kind
        if not isinstance(made, DeviceArray):
            on_host, made = made, array.new(made.shape)
            made[...] = on_host
        return made.tensor

    shown: Memory = array
    return Bound(shown, name, wrap, tensor, touched)


def plain_shape(x: Any) -> tuple[int, ...] | None:
    """Return the shape of a plain array or CPU tensor; None where `bind` must look closer."""
    return x.shape if type(x) is np.ndarray else _core.tensor_shape(x)


def fresh(call: str, like_x: Any, shape: Sequence[int]) -> Any:
    """Return a new array or CPU tensor of the dtype of another; None if numpy has no such dtype.

    The memory is numpy's, which takes large pages for large arrays.
    """
    if type(like_x) is np.ndarray:
        return private(call, shape, like_x.dtype)
    dtype = _in_numpy(like_x.dtype)
    if dtype is None:
        return None
    torch = sys.modules["torch"]
    made = torch.from_numpy(private(call, shape, dtype))
    return made.view(torch.bfloat16) if like_x.dtype is torch.bfloat16 else made


@cache
def _in_numpy(dtype: Any) -> np.dtype[Any] | None:
    """Return what an array of a tensor's memory has for a dtype."""
    name = str(dtype).removeprefix("torch.")
    return np.dtype("uint16" if name == "bfloat16" else name) if name in CODES else None


def _untouched() -> None:
    """Nobody keeps count of writes to a numpy array."""


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
