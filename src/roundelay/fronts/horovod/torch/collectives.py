"""Horovod's functions on tensors: at once, in the background, in place, and some together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundelay.arguments import shown
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod.basics import (
    Average,
    ProcessSet,
    Sum,
    global_process_set,
    reduction_of,
)
from roundelay.fronts.horovod.errors import HorovodInternalError
from roundelay.fronts.horovod.operation import Operation
from roundelay.fronts.horovod.session import current
from roundelay.fronts.horovod.torch import operations
from roundelay.fronts.horovod.torch.checks import scales_of, tensor_of, tensors_of

__all__ = [
    "allgather_async", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall_async",
    "broadcast_", "broadcast_async", "broadcast_async_", "grouped_allgather_async",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "grouped_reducescatter_async", "poll", "reducescatter_async", "sparse_allreduce_async",
    "synchronize",
]  # fmt: skip

Tensors = Sequence[torch.Tensor]


class OfOne:
    """An operation on one tensor, which is made of one on several."""

    __slots__ = ("operation",)

    def __init__(self, operation: Operation) -> None:
        self.operation = operation


Handle = Operation | OfOne


def poll(handle: Handle) -> bool:
    """Tell whether `synchronize` would return at once."""
    return _operation(handle).done()


def synchronize(handle: Handle) -> Any:  # a tensor, or some
    """Return the result of an operation once it has run, or raise what went wrong."""
    result = current("synchronize()").negotiation.wait(_operation(handle))
    return result[0] if isinstance(handle, OfOne) else result


def _operation(handle: object) -> Operation:
    if isinstance(handle, OfOne):
        return handle.operation
    if not isinstance(handle, Operation):
        raise InvalidArgumentError(f"This takes what an hvd.…_async call returned, not {handle!r}.")
    return handle


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's order
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce a tensor into a new one; `synchronize` gives it."""
    op = reduction_of("allreduce", op, average)
    scales = scales_of(prescale_factor, postscale_factor)
    output = _like("allreduce_async", tensor)
    return OfOne(operations.allreduce([tensor], [output], name, op, scales, process_set))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's order
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce a tensor in place."""
    op = reduction_of("allreduce_", op, average)
    scales, given = scales_of(prescale_factor, postscale_factor), [tensor_of("allreduce_", tensor)]
    return OfOne(operations.allreduce(given, given, name, op, scales, process_set))


def allreduce_(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Reduce a tensor in place, and return it; see `allreduce_async_`."""
    synchronize(allreduce_async_(tensor, *arguments, **options))
    return tensor


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,  # noqa: FBT001 - Horovod's order
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce tensors, all of them once every rank has all of them."""
    op = reduction_of("grouped_allreduce", op, average)
    scales = scales_of(prescale_factor, postscale_factor)
    given = tensors_of("grouped_allreduce", tensors)
    outputs = [_like("grouped_allreduce", tensor) for tensor in given]
    return operations.allreduce(given, outputs, name, op, scales, process_set)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,  # noqa: FBT001 - Horovod's order
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce tensors in place, all of them once every rank has all of them."""
    op = reduction_of("grouped_allreduce_", op, average)
    scales = scales_of(prescale_factor, postscale_factor)
    given = tensors_of("grouped_allreduce_", tensors)
    return operations.allreduce(given, given, name, op, scales, process_set)


def grouped_allreduce_(tensors: Tensors, *arguments: Any, **options: Any) -> Any:
    """Reduce tensors in place, and return them; see `grouped_allreduce_async_`."""
    return synchronize(grouped_allreduce_async_(tensors, *arguments, **options))


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin to add up sparse tensors, by gathering what each has; call what it returns to wait."""
    if op not in (Average, Sum):
        raise InvalidArgumentError("hvd.sparse_allreduce_async takes op=hvd.Sum or hvd.Average.")
    size = len(current("sparse_allreduce_async()").members(process_set))
    if getattr(tensor, "layout", None) is not torch.sparse_coo:
        raise InvalidArgumentError(
            f"hvd.sparse_allreduce_async takes a sparse tensor in COO layout, not {shown(tensor)}."
        )
    mine = tensor.detach().coalesce()
    shape = torch.tensor([mine.shape], dtype=torch.int64)
    parts = [mine.indices().t().contiguous(), mine.values(), shape]
    begun = operations.allgather(parts, f"sparse.{name}", process_set)

    def wait() -> torch.Tensor:
        indices, values, shapes = synchronize(begun)
        if (shapes != shapes[0]).any():
            raise HorovodInternalError(
                f"sparse_allreduce {name!r} needs one shape on every rank, but the ranks have "
                f"{', '.join(str(tuple(one)) for one in shapes.tolist())}."
            )
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)
        return (total / size if op == Average else total).coalesce()

    return wait


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to gather the rows of all ranks, which may have different numbers of them."""
    given = [tensor_of("allgather", tensor)]
    return OfOne(operations.allgather(given, name, process_set))


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to gather the rows of several tensors."""
    given = tensors_of("grouped_allgather", tensors)
    return operations.allgather(given, name, process_set)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to bring the root's tensor into a new one."""
    output = _like("broadcast", tensor)
    return operations.broadcast(tensor, output, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to fill a tensor with the root's."""
    given = tensor_of("broadcast_", tensor)
    return operations.broadcast(given, given, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Fill a tensor with the root's, and return it."""
    synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to send `splits` rows to each rank; gives what came, with splits also from whom."""
    begun = operations.alltoall(tensor_of("alltoall", tensor), splits, name, process_set)
    return OfOne(begun) if splits is None else begun


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to reduce a tensor, of which every rank gets its share of the rows."""
    scales = scales_of(prescale_factor, postscale_factor)
    given = [tensor_of("reducescatter", tensor)]
    return OfOne(operations.reducescatter(given, name, op, scales, process_set))


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to reduce several tensors, of which every rank gets its share of the rows."""
    scales = scales_of(prescale_factor, postscale_factor)
    given = tensors_of("grouped_reducescatter", tensors)
    return operations.reducescatter(given, name, op, scales, process_set)


def _like(call: str, tensor: torch.Tensor) -> torch.Tensor:
    given = tensor_of(call, tensor)
    return torch.empty_like(given, memory_format=torch.contiguous_format, requires_grad=False)
