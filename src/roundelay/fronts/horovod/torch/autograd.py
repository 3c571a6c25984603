"""Horovod's functions that gradients flow through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundelay.fronts.horovod.basics import (
    Average,
    ProcessSet,
    Sum,
    global_process_set,
    reduction_of,
)
from roundelay.fronts.horovod.session import current
from roundelay.fronts.horovod.torch.checks import compressor_of, tensor_of, tensors_of
from roundelay.fronts.horovod.torch.collectives import (
    allgather_async,
    allreduce_async,
    alltoall_async,
    broadcast_async,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_reducescatter_async,
    synchronize,
)
from roundelay.fronts.horovod.torch.compression import Compression, Compressor

__all__ = [
    "allgather", "allreduce", "alltoall", "broadcast", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "reducescatter",
]  # fmt: skip

Tensors = Sequence[torch.Tensor]
Compress = type[Compressor]


class HorovodReduce(torch.autograd.Function):
    """An all-reduce of some tensors, whose gradient is the same all-reduce."""

    @staticmethod
    def forward(ctx: Any, name: str | None, options: dict[str, Any], *tensors: Any) -> Any:
        """Reduce them together."""
        ctx.options = options
        return tuple(synchronize(grouped_allreduce_async(tensors, name=name, **options)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Reduce the gradients, in the same way."""
        return None, None, *HorovodReduce.apply(None, ctx.options, *_dense(grads))  # type: ignore[no-untyped-call]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's order
    name: str | None = None,
    compression: Compress = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor reduced over all ranks of the process set; its mean, unless told."""
    given, factors = tensor_of("allreduce", tensor), (prescale_factor, postscale_factor)
    if compression is Compression.none and not (given.requires_grad and torch.is_grad_enabled()):
        begun = allreduce_async(given, average, name, op, *factors, process_set)
        result: torch.Tensor = synchronize(begun)
        return result
    return grouped_allreduce([given], average, name, compression, op, *factors, process_set)[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,  # noqa: FBT001 - Horovod's order
    name: str | None = None,
    compression: Compress = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the tensors reduced, all of them once every rank has all of them."""
    options = {
        "op": reduction_of("allreduce", op, average),
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    given = tensors_of("allreduce", tensors)
    packed = [compressor_of(compression).compress(tensor) for tensor in given]
    given = [tensor for tensor, _ in packed]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        results = HorovodReduce.apply(name, options, *given)  # type: ignore[no-untyped-call]
    else:  # autograd would cost more than the operation
        results = synchronize(grouped_allreduce_async(given, name=name, **options))  # type: ignore[arg-type]
    contexts = [context for _, context in packed]
    return [compression.decompress(*pair) for pair in zip(results, contexts, strict=True)]


class HorovodGather(torch.autograd.Function):
    """Everybody's rows, whose gradient is the mean of what all ranks have for one's own rows."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Any) -> Any:
        """Gather them together."""
        ctx.rows, ctx.process_set = [sum(tensor.shape[:1]) for tensor in tensors], process_set
        return tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Average the gradients, and keep one's own rows."""
        whole = grouped_allreduce(_dense(grads), op=Average, process_set=ctx.process_set)
        mine = []
        rows = torch.tensor([ctx.rows])
        told = synchronize(allgather_async(rows, process_set=ctx.process_set))
        place = ctx.process_set.rank()
        for grad, counts in zip(whole, told.t().tolist(), strict=True):
            start = sum(counts[:place])
            mine.append(grad[start : start + counts[place]])
        return None, None, *mine


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the rows of all ranks, one after the other."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return the rows of all ranks, of several tensors."""
    given = tensors_of("allgather", tensors)
    return list(HorovodGather.apply(name, process_set, *given))  # type: ignore[no-untyped-call]


class HorovodBroadcast(torch.autograd.Function):
    """The root's tensor, whose gradient is the mean of all, at the root."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, root: int, name: str | None, process_set: ProcessSet) -> Any:
        """Bring the root's."""
        ctx.root, ctx.process_set = root, process_set
        return synchronize(broadcast_async(tensor, root, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Average the gradients; none but the root's tensor has one."""
        mean = allreduce(grads[0].contiguous(), op=Average, process_set=ctx.process_set)
        return (mean if current("rank()").rank == ctx.root else mean * 0), None, None, None


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the root's tensor, on every rank of the process set."""
    result: torch.Tensor = HorovodBroadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


class HorovodExchange(torch.autograd.Function):
    """Rows for everybody, whose gradient goes back the way they came."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Any, splits: Any, name: str | None, process_set: ProcessSet
    ) -> Any:
        """Send rows, and take those that come."""
        counts = splits
        if counts is None:
            size = len(current("alltoall()").members(process_set))
            even = len(tensor) // size if tensor.dim() and len(tensor) % size == 0 else -1
            counts = None if even < 0 else torch.full((size,), even, dtype=torch.int32)
        came = synchronize(alltoall_async(tensor, counts, name, process_set))
        ctx.received, ctx.process_set, ctx.rows = came[1], process_set, len(tensor)
        ctx.mark_non_differentiable(came[1])
        return came

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Send gradients back; rows that went nowhere have none."""
        back, _ = alltoall(grads[0].contiguous(), ctx.received, process_set=ctx.process_set)
        if len(back) < ctx.rows:
            back = torch.cat([back, back.new_zeros((ctx.rows - len(back), *back.shape[1:]))])
        return back, None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # a tensor, or with splits two
    """Return the rows that others sent to this rank; with `splits`, also how many from whom."""
    result = HorovodExchange.apply(tensor_of("alltoall", tensor), splits, name, process_set)  # type: ignore[no-untyped-call]
    return result[0] if splits is None else result


class HorovodShare(torch.autograd.Function):
    """A share of the rows of a reduction, whose gradient is everybody's shares together."""

    @staticmethod
    def forward(ctx: Any, name: str | None, options: dict[str, Any], *tensors: Any) -> Any:
        """Reduce them, and keep a share of each."""
        ctx.options = options
        return tuple(synchronize(grouped_reducescatter_async(tensors, name, **options)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gather the gradients; of a sum they count once for every rank."""
        process_set = ctx.options["process_set"]
        factor = ctx.options["prescale_factor"] * ctx.options["postscale_factor"]
        if ctx.options["op"] == Sum:
            factor *= process_set.size()
        scaled = [grad * factor for grad in _dense(grads)]
        return None, None, *grouped_allgather(scaled, process_set=process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compress = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's share of the rows of the reduced tensor; lower ranks have one more."""
    results = grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )
    return results[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Compress = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's shares of the rows of several reduced tensors."""
    options = {
        "op": op,
        "process_set": process_set,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    given = tensors_of("reducescatter", tensors)
    packed = [compressor_of(compression).compress(tensor) for tensor in given]
    results = HorovodShare.apply(name, options, *(tensor for tensor, _ in packed))  # type: ignore[no-untyped-call]
    contexts = [context for _, context in packed]
    return [compression.decompress(*pair) for pair in zip(results, contexts, strict=True)]


def _dense(grads: Sequence[Any]) -> list[torch.Tensor]:
    """Return gradients as operations take them: autograd may hand out views that repeat."""
    return [grad.contiguous() for grad in grads]
