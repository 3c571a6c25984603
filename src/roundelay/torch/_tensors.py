"""From tensors to memory: what the communicator takes for each of torch's dtypes and layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from roundelay.errors import InvalidArgumentError, UnsupportedReductionError

Buffer: TypeAlias = Any  # a flat numpy array or, where numpy lacks the dtype, a flat tensor
Copy: TypeAlias = Callable[[], object]

#: Those that numpy has too, so that the quickest way is open.
IN_NUMPY = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
})  # fmt: skip

#: Whether a tensor's value lies elsewhere, in place of memory of its own.
functionalized = torch._is_functional_tensor  # noqa: SLF001 - torch's name for it


def plain(call: str, tensor: Tensor) -> Tensor:
    """Return the tensor without autograd, if it is dense and on the CPU; else say the way out."""
    if tensor.device.type != "cpu":
        raise InvalidArgumentError(
            f"{call} got a tensor on {tensor.device}, but the backend roundelay works on CPU "
            f'tensors. Pass tensor.cpu(), or make a group for it: dist.new_group(backend="nccl").'
        )
    if tensor.is_nested:
        raise InvalidArgumentError(
            f"{call} takes dense tensors, not nested ones. Pass tensor.to_padded_tensor(0), or its "
            f"tensors one by one: tensor.unbind()."
        )
    if tensor.layout is not torch.strided:
        raise InvalidArgumentError(
            f"{call} takes dense tensors, not {tensor.layout}; of sparse ones, all_reduce takes "
            f"COO. Pass tensor.to_dense()."
        )
    if functionalized(tensor):
        raise InvalidArgumentError(
            f"{call} writes into memory, which a functionalized tensor has none of. Make the call "
            f"outside of torch.func.functionalize."
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgumentError(
            f"{call} writes into memory, which a lazily conjugated or negated tensor shares with "
            f"another. Pass tensor.resolve_conj().resolve_neg()."
        )
    return tensor.detach()


def memory(call: str, tensor: Tensor, *, reduces: bool = False) -> Buffer:
    """Return the memory of a contiguous tensor, flat; dtypes that only move are bytes."""
    if tensor.dtype in IN_NUMPY and not functionalized(tensor):
        try:
            return (tensor.detach() if tensor.requires_grad else tensor).numpy().reshape(-1)
        except (TypeError, RuntimeError, NotImplementedError):
            return plain(call, tensor).numpy().reshape(-1)  # says why not, if it can't be
    flat = plain(call, tensor)
    # Strides of a single element mean nothing, but a view as bytes would look at them.
    flat = flat.as_strided((flat.numel(),), (1,))
    if flat.dtype is torch.bfloat16:
        return flat
    if reduces:
        raise UnsupportedReductionError(
            f"{call} does not reduce {tensor.dtype}, which has no addition on the CPU. Convert it: "
            f"tensor.float()."
        )
    return flat.view(torch.uint8).numpy()


def into(call: str, tensor: Tensor, *, reduces: bool = False) -> tuple[Buffer, Copy | None]:
    """Return memory for a result, holding what is there now, and what brings it to the tensor."""
    if tensor.layout is torch.strided and tensor.is_contiguous():
        return memory(call, tensor, reduces=reduces), None
    target = plain(call, tensor)
    packed = target.contiguous()
    return memory(call, packed, reduces=reduces), lambda: target.copy_(packed)


def joined(call: str, tensors: Sequence[Tensor], *, reduces: bool = False) -> Buffer:
    """Return all tensors one after the other, in one piece of memory."""
    whole = torch.cat([plain(call, tensor).reshape(-1) for tensor in tensors])
    return memory(call, whole, reduces=reduces)


def rows(call: str, tensors: Sequence[Tensor]) -> tuple[Buffer, Copy]:
    """Return memory for results one after the other, and what brings each to its tensor."""
    targets = [plain(call, tensor) for tensor in tensors]
    lengths = [target.numel() for target in targets]
    whole = torch.empty(sum(lengths), dtype=targets[0].dtype)
    cut = torch.split(whole, lengths)
    parts = [part.view(like.shape) for part, like in zip(cut, targets, strict=True)]

    def copy() -> None:
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)

    return memory(call, whole), copy


def shared(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors may lie in the same memory in part."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def beside(given: Tensor, part: Tensor, whole: Tensor, rank: int) -> Tensor:
    """Return the input, one of `part` and `whole`, in memory that the other does not overwrite.

    A part that is the rank's own block of the whole is in its place: collectives know that.
    """
    in_place = part.data_ptr() == whole.data_ptr() + rank * part.nbytes
    own = in_place and part.is_contiguous() and whole.is_contiguous()
    return given.clone() if shared(part, whole) and not own else given


def whole_numbers(tensor: Tensor) -> bool:
    """Tell whether a tensor holds integers; bools are none."""
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def divide(sums: Buffer, size: int, after: Copy | None) -> None:
    """Make averages of sums of integers as NCCL does: towards zero. Then do what follows."""
    wide = sums.astype(np.uint64 if sums.dtype.kind == "u" else np.int64)
    sums[...] = (wide - np.fmod(wide, size)) // size
    if after is not None:
        after()


def units(tensor: Tensor) -> int:
    """Return how many elements of `memory` one element of a tensor is: more where it is bytes."""
    known = tensor.dtype in IN_NUMPY or tensor.dtype is torch.bfloat16
    return 1 if known else tensor.element_size()
