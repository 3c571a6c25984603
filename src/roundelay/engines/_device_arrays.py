"""Tensors in the memory of a device, with as much of a numpy array about them as calls ask for."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from roundelay.reductions import Array


class _Flags(NamedTuple):
    c_contiguous: bool
    writeable: bool = True


class DeviceArray:
    """A tensor that numpy can't see. Its dtype is numpy's, with uint16 for bfloat16 as elsewhere.

    `numpy.asarray` of it is a copy in the memory of the host.
    """

    def __init__(self, tensor: Any, dtype: np.dtype[Any]) -> None:  # a tensor; torch is optional
        self.tensor, self.dtype = tensor, dtype
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        self.ndim, self.size = len(self.shape), int(tensor.numel())
        self.nbytes = self.size * dtype.itemsize
        self.strides: tuple[int, ...] = tuple(tensor.stride())
        self.flags = _Flags(bool(tensor.is_contiguous()))

    @property
    def address(self) -> int:
        """Where it begins in the device's memory."""
        return int(self.tensor.data_ptr())

    def reshape(self, *shape: int) -> DeviceArray:
        """Return the same memory in another shape."""
        return DeviceArray(self.tensor.reshape(shape), self.dtype)

    def copy(self) -> DeviceArray:
        """Return the same elements in new contiguous memory."""
        return DeviceArray(self.tensor.contiguous().clone(), self.dtype)

    def contiguous(self) -> DeviceArray:
        """Return itself where that is contiguous, else a copy."""
        return self if self.flags.c_contiguous else self.copy()

    def new(self, shape: tuple[int, ...]) -> DeviceArray:
        """Return new memory on the same device."""
        return DeviceArray(self.tensor.new_empty(shape), self.dtype)

    def is_beside(self, other: DeviceArray) -> bool:
        """Tell whether two tensors lie in the same storage."""
        mine, theirs = self.tensor.untyped_storage(), other.tensor.untyped_storage()
        return bool(mine.data_ptr() == theirs.data_ptr())

    def place(self) -> Array:
        """Return an array of numpy's with these addresses, to be compared and never to be read."""
        return np.asarray(_Extent(self))

    def __setitem__(self, where: Any, values: Any) -> None:
        if isinstance(values, DeviceArray):
            self.tensor[where] = values.tensor
            return
        host = _seen(np.ascontiguousarray(values), self.tensor.dtype)
        self.tensor[where] = host.to(self.tensor.device)

    def __array__(
        self,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,  # noqa: FBT001 - numpy's
    ) -> Array:
        del copy  # it always is one
        host = self.tensor.detach().cpu().contiguous()
        found: Array = _bits(host).numpy().view(self.dtype)
        return found if dtype is None else found.astype(dtype)


def on_device(array: object) -> bool:
    """Tell whether an array lies in the memory of a device."""
    return isinstance(array, DeviceArray)


class _Extent:
    """Where a tensor lies, as numpy asks for it."""

    def __init__(self, array: DeviceArray) -> None:
        steps = tuple(step * array.dtype.itemsize for step in array.strides)
        self.__array_interface__ = {
            "data": (array.address, True),
            "shape": array.shape,
            "strides": steps,
            "typestr": array.dtype.str,
            "version": 3,
        }


def _bits(tensor: Any) -> Any:
    """Return a tensor that numpy knows: bfloat16 by its bits, as numbers of 16."""
    torch = sys.modules["torch"]
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


def _seen(array: Array, kind: Any) -> Any:
    """Return an array of the host's as a tensor of torch's dtype `kind`."""
    torch = sys.modules["torch"]
    known = array.view(np.int16) if kind is torch.bfloat16 else array
    tensor = torch.from_numpy(known if known.flags.writeable else known.copy())
    return tensor.view(kind) if kind is torch.bfloat16 else tensor
