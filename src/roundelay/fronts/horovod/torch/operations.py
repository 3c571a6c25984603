"""What every operation does with tensors once it runs: on the host, with the set's communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import torch

from roundelay.arguments import index_of
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod.basics import Adasum, Average, Max, Min, ProcessSet, Product, Sum
from roundelay.fronts.horovod.errors import HorovodInternalError
from roundelay.fronts.horovod.operation import Operation, Terms
from roundelay.fronts.horovod.session import current
from roundelay.fronts.horovod.torch.adasum import adasum
from roundelay.fronts.horovod.torch.checks import (
    counts_of,
    require_adasum,
    require_dtypes,
    require_rows,
)

__all__ = ["Scales", "allgather", "allreduce", "alltoall", "broadcast", "reducescatter", "stand_in"]

WORDS = {Average: "avg", Sum: "sum", Min: "min", Max: "max", Product: "prod"}
#: Factors before and after the reduction.
Scales = tuple[float, float]
Tensors = Sequence[torch.Tensor]
#: Brings tensors to the host.
Given = Callable[[], list[torch.Tensor]]
#: Dtypes, shapes, and the type of the device.
Kinds = tuple[tuple[torch.dtype, ...], tuple[torch.Size, ...], str]


def allreduce(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    scales: Scales,
    process_set: ProcessSet,
) -> Operation:
    """Submit the reduction of some tensors together; the result is the list of outputs."""
    here = current("allreduce()")
    members, number = here.members(process_set), process_set.process_set_id or 0
    if op == Adasum:
        require_adasum(len(members), number)
    terms, given = _reducing(_kinds(tensors), op, scales), _given(tensors)

    def run(comm: Communicator) -> Tensors:
        for source, output in zip(given(), outputs, strict=True):
            _reduce(comm, op, scales, source, output)
        return outputs

    return here.submit("allreduce", name, number, terms, run)


def stand_in(terms: Terms) -> Operation:
    """Return the operation of a rank that has joined: zeros in the place of tensors."""
    said = dict(terms)

    def run(comm: Communicator) -> None:
        kinds = zip(said.get("dtype", ()), said.get("shape", ()), strict=True)
        zeros = [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in kinds]
        for zero in zeros:
            _reduce(comm, said["op"], (1.0, 1.0), zero, zero)

    return Operation("allreduce", "of a rank that has joined", 0, terms, run)


def _reduce(
    comm: Communicator, op: int, scales: Scales, source: torch.Tensor, output: torch.Tensor
) -> None:
    before, after = scales
    source, output = scaled(source, before), _detached(output)
    target = output if _direct(output) else torch.empty_like(source)
    if op == Adasum:
        target.copy_(adasum(comm, source))
    elif op == Average and not source.dtype.is_floating_point and not source.is_complex():
        target.copy_(_whole_average(source, comm.size, comm.all_reduce))
    elif source.data_ptr() == target.data_ptr():
        comm.all_reduce(target, WORDS[op])
    else:
        comm.all_reduce(source, WORDS[op], out=target)
    if after != 1.0:
        target.copy_(scaled(target, after))
    if target is not output:
        output.copy_(target)


def allgather(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet
) -> Operation:
    """Submit the concatenation of everybody's rows; the result is a list of new tensors."""
    here = current("allgather()")
    here.members(process_set)
    for tensor in tensors:
        require_rows("allgather", tensor)
    given = _given(tensors)

    def run(comm: Communicator) -> list[torch.Tensor]:
        rows = comm.all_gather(np.array([len(tensor) for tensor in tensors], np.int64)).T.tolist()
        return [
            comm.all_gather(source, axis=0, counts=counts).to(tensor.device)
            for tensor, source, counts in zip(tensors, given(), rows, strict=True)
        ]

    return here.submit("allgather", name, process_set.process_set_id or 0, _row_terms(tensors), run)


def broadcast(
    tensor: torch.Tensor,
    output: torch.Tensor,
    root: int,
    name: str | None,
    process_set: ProcessSet,
) -> Operation:
    """Submit the root's tensor for all; the result is the output, filled."""
    here = current("broadcast()")
    members = here.members(process_set)
    if index_of(root) not in members:
        raise InvalidArgumentError(
            f"hvd.broadcast has no root_rank {root!r}: the process set has ranks {list(members)}."
        )
    terms = (*_terms(_kinds([tensor])), ("root_rank", root))
    given = _given([tensor])

    def run(comm: Communicator) -> torch.Tensor:
        target = output.detach()
        if not _direct(target):
            target = torch.empty(output.shape, dtype=output.dtype)
        if here.rank == root and target.data_ptr() != tensor.data_ptr():
            target.copy_(given()[0])
        comm.broadcast(target, members.index(root))
        if not _direct(output):
            output.detach().copy_(target)
        return output

    return here.submit("broadcast", name, process_set.process_set_id or 0, terms, run)


def alltoall(
    tensor: torch.Tensor, splits: torch.Tensor | None, name: str | None, process_set: ProcessSet
) -> Operation:
    """Submit rows for every rank; the result is what came, and how many rows from whom."""
    here = current("alltoall()")
    members = here.members(process_set)
    require_rows("alltoall", tensor)
    counts = counts_of(tensor, splits, len(members))
    given = _given([tensor])

    def run(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        received = comm.all_to_all(np.array(counts, np.int64).reshape(-1, 1)).reshape(-1)
        rows = given()[0][: sum(counts)]
        came = comm.all_to_all(rows, axis=0, counts=counts)
        device = splits.device if isinstance(splits, torch.Tensor) else tensor.device
        told = torch.from_numpy(received.astype(np.int32)).to(device)
        return came.to(tensor.device), told

    return here.submit("alltoall", name, process_set.process_set_id or 0, _row_terms([tensor]), run)


def reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    scales: Scales,
    process_set: ProcessSet,
) -> Operation:
    """Submit the reduction of some tensors; the result is this rank's share of the rows of each."""
    here = current("reducescatter()")
    size = len(here.members(process_set))
    if op not in (Average, Sum):
        raise HorovodInternalError("hvd.reducescatter takes op=hvd.Sum or hvd.Average only.")
    terms = _reducing(_kinds(tensors), op, scales)
    for tensor in tensors:
        require_rows("reducescatter", tensor)
    given = _given(tensors)

    def share(comm: Communicator, tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        base, extra = divmod(len(tensor), size)
        counts = [base + (rank < extra) for rank in range(size)]
        source = scaled(source, scales[0])
        if op == Average and not source.dtype.is_floating_point and not source.is_complex():
            add = partial(comm.reduce_scatter, axis=0, counts=counts)
            mine = _whole_average(source, size, add).to(source.dtype)
        else:
            mine = comm.reduce_scatter(source, WORDS[op], axis=0, counts=counts)
        return scaled(mine, scales[1]).to(tensor.device)

    def run(comm: Communicator) -> list[torch.Tensor]:
        return [share(comm, *pair) for pair in zip(tensors, given(), strict=True)]

    return here.submit("reducescatter", name, process_set.process_set_id or 0, terms, run)


def _whole_average(
    source: torch.Tensor, size: int, add: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the average of whole numbers, exactly, rounded towards zero: no sum of them wraps."""
    wide = source.to(torch.int64)
    parts = wide.div(size, rounding_mode="floor")
    left = wide - parts * size
    total, rest = add(parts), add(left)  # in place; the sum is total · size + rest
    found = total + rest.div(size, rounding_mode="floor")
    return found + ((found < 0) & (rest % size != 0))


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply as Horovod does: whole numbers in float64, float16 in float32, then back."""
    if factor == 1.0:
        return tensor
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return (tensor.float() * factor).to(tensor.dtype)
    if tensor.dtype.is_floating_point or tensor.is_complex():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


# ---- what goes in, and what must be alike


def _given(tensors: Sequence[torch.Tensor]) -> Given:
    """Return what brings tensors to the host when the operation runs, after what computes them."""
    if len(tensors) == 1 and tensors[0].is_cpu:  # most often
        alone = [_detached(tensors[0]).contiguous()]
        return lambda: alone
    if all([tensor.is_cpu for tensor in tensors]):  # noqa: C419 - in a hot path
        ready = [_detached(tensor).contiguous() for tensor in tensors]
        return lambda: ready
    event = torch.cuda.current_stream().record_event()

    def fetch() -> list[torch.Tensor]:
        event.synchronize()
        return [tensor.detach().cpu().contiguous() for tensor in tensors]

    return fetch


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its graph; most have none, and detaching costs more than asking."""
    return tensor.detach() if tensor.requires_grad else tensor


def _direct(output: torch.Tensor) -> bool:
    return output.is_cpu and output.is_contiguous()


def _kinds(tensors: Sequence[torch.Tensor]) -> Kinds:
    if len(tensors) == 1 and tensors[0].is_cpu:  # most often
        return (tensors[0].dtype,), (tensors[0].shape,), "cpu"
    device = "cpu" if not tensors or tensors[0].is_cpu else tensors[0].device.type
    return tuple([t.dtype for t in tensors]), tuple([t.shape for t in tensors]), device


def _terms(kinds: Kinds) -> Terms:
    dtypes, shapes, device = kinds
    return (
        ("dtype", tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)),
        ("shape", tuple(tuple(shape) for shape in shapes)),
        ("device", device),
    )


@lru_cache(maxsize=4096)
def _reducing(kinds: Kinds, op: int, scales: Scales) -> Terms:
    """Return the terms of a reduction."""
    require_dtypes(kinds[0], op)
    factors = ("prescale_factor and postscale_factor", tuple(map(float, scales)))
    return (*_terms(kinds), ("op", op), factors)


def _row_terms(tensors: Sequence[torch.Tensor]) -> Terms:
    """Return what must be alike where ranks may bring different numbers of rows."""
    dtypes, _, device = _terms(_kinds(tensors))
    return dtypes, ("shape but the first dim", tuple(tuple(t.shape[1:]) for t in tensors)), device
