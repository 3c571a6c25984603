"""What every operation does with tensors once it runs: on the host, with the set's communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod.basics import Adasum, Average, Max, Min, ProcessSet, Product, Sum
from roundelay.fronts.horovod.errors import HorovodInternalError, UnsupportedOperationError
from roundelay.fronts.horovod.operation import Operation, Terms, Together, number_of
from roundelay.fronts.horovod.session import current
from roundelay.fronts.horovod.torch.adasum import adasum
from roundelay.fronts.horovod.torch.fusion import reduce_all

__all__ = ["Scales", "allgather", "allreduce", "alltoall", "broadcast", "reducescatter", "stand_in"]

WORDS = {Average: "avg", Sum: "sum", Min: "min", Max: "max", Product: "prod"}
#: Factors before and after the reduction.
Scales = tuple[float, float]


def allreduce(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    scales: Scales,
    process_set: ProcessSet,
) -> Operation:
    """Submit the reduction of some tensors together; the result is the list of outputs."""
    here, number = current("allreduce()"), process_set.process_set_id or 0
    members = here.members(process_set.process_set_id)
    if op == Adasum:
        _check_adasum(len(members), number)
    _check_dtypes(tensors, op)
    terms = _reducing_terms(tensors, op, scales)
    given = _given(tensors)

    def run(comm: Communicator) -> list[torch.Tensor]:
        return run_all(comm, [(given, outputs)])[0]

    def run_all(comm: Communicator, parts: list[Any]) -> list[list[torch.Tensor]]:
        pairs = (pair for given, outputs in parts for pair in zip(given(), outputs, strict=True))
        reduce_all(pairs, op, here.together, partial(_reduce, comm, op, scales))
        return [list(outputs) for _, outputs in parts]

    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    together = Together(number_of((op, scales)), nbytes, (given, outputs), run_all)
    return here.submit("allreduce", name, number, terms, run, together)


def _check_dtypes(tensors: Sequence[torch.Tensor], op: int) -> None:
    for dtype in (tensor.dtype for tensor in tensors):
        if op == Average and dtype in (torch.bool, torch.uint64):
            raise InvalidArgumentError(
                f"hvd.Average takes no {dtype}. Use hvd.Max or hvd.Min, or tensor.long()."
            )
        if op == Adasum and not dtype.is_floating_point:
            raise InvalidArgumentError(
                f"hvd.Adasum compares the directions of real gradients, and takes no {dtype}. "
                f"Use hvd.Sum, or tensor.double()."
            )


def stand_in(terms: Terms) -> Operation:
    """Return the operation of a rank that has joined: zeros in the place of tensors."""
    said = dict(terms)

    def run(comm: Communicator) -> None:
        kinds = zip(said.get("dtype", ()), said.get("shape", ()), strict=True)
        zeros = [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in kinds]
        op, most = said.get("op", Sum), current("join()").together
        reduce = partial(_reduce, comm, op, (1.0, 1.0))
        reduce_all(zip(zeros, zeros, strict=True), op, most, reduce)

    return Operation("allreduce", "of a rank that has joined", 0, terms, run)


def _reduce(
    comm: Communicator, op: int, scales: Scales, source: torch.Tensor, output: torch.Tensor
) -> None:
    before, after = scales
    source, output = scaled(source, before), output.detach()
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
    here.members(process_set.process_set_id)
    for tensor in tensors:
        _require_rows("allgather", tensor)
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
    members = here.members(process_set.process_set_id)
    if root not in members:
        raise InvalidArgumentError(
            f"hvd.broadcast has no root_rank {root!r}: the process set has ranks {list(members)}."
        )
    terms = (*_terms([tensor]), ("root_rank", root))
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
    members = here.members(process_set.process_set_id)
    _require_rows("alltoall", tensor)
    counts = _counts(tensor, splits, len(members))
    given = _given([tensor])

    def run(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        received = comm.all_to_all(np.array(counts, np.int64).reshape(-1, 1)).reshape(-1)
        rows = given()[0][: sum(counts)]
        came = comm.all_to_all(rows, axis=0, counts=counts)
        device = tensor.device if splits is None else splits.device
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
    size = len(here.members(process_set.process_set_id))
    if op not in (Average, Sum):
        raise HorovodInternalError("hvd.reducescatter takes op=hvd.Sum or hvd.Average only.")
    _check_dtypes(tensors, op)
    for tensor in tensors:
        _require_rows("reducescatter", tensor)
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

    terms = _reducing_terms(tensors, op, scales)
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


def _given(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Return what brings tensors to the host when the operation runs, after what computes them."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        ready = [tensor.detach().contiguous() for tensor in tensors]
        return lambda: ready
    event = torch.cuda.current_stream().record_event()

    def fetch() -> list[torch.Tensor]:
        event.synchronize()
        return [tensor.detach().cpu().contiguous() for tensor in tensors]

    return fetch


def _direct(output: torch.Tensor) -> bool:
    return output.device.type == "cpu" and output.is_contiguous()


def _terms(tensors: Sequence[torch.Tensor]) -> Terms:
    return (
        ("dtype", tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)),
        ("shape", tuple(tuple(tensor.shape) for tensor in tensors)),
        ("device", tensors[0].device.type if tensors else "cpu"),
    )


def _row_terms(tensors: Sequence[torch.Tensor]) -> Terms:
    """Return what must be alike where ranks may bring different numbers of rows."""
    dtypes, _, device = _terms(tensors)
    return dtypes, ("shape but the first dim", tuple(tuple(t.shape[1:]) for t in tensors)), device


def _reducing_terms(tensors: Sequence[torch.Tensor], op: int, scales: Scales) -> Terms:
    factors = ("prescale_factor and postscale_factor", tuple(map(float, scales)))
    return (*_terms(tensors), ("op", op), factors)


def _require_rows(call: str, tensor: torch.Tensor) -> None:
    if tensor.dim() == 0:
        raise InvalidArgumentError(
            f"hvd.{call} takes tensors with at least one dim; of a scalar, pass x.reshape(1)."
        )


def _counts(tensor: torch.Tensor, splits: Any, size: int) -> list[int]:
    if splits is None:
        if len(tensor) % size:
            raise InvalidArgumentError(
                f"hvd.alltoall without splits= needs rows that divide by the {size} ranks, not "
                f"{len(tensor)}."
            )
        return [len(tensor) // size] * size
    told = torch.as_tensor(splits)
    if told.dtype.is_floating_point or told.is_complex() or tuple(told.shape) != (size,):
        raise InvalidArgumentError(
            f"hvd.alltoall takes splits of {size} whole numbers, one for each rank, not "
            f"{told.dtype} of shape {tuple(told.shape)}."
        )
    counts: list[int] = told.tolist()
    if min(counts) < 0 or sum(counts) > len(tensor):
        raise InvalidArgumentError(
            f"hvd.alltoall: splits {counts} add up to more than the {len(tensor)} rows there are, "
            f"or are negative."
        )
    return counts


def _check_adasum(size: int, process_set: int) -> None:
    if process_set:
        raise UnsupportedOperationError("op=hvd.Adasum works over all ranks, not a process set.")
    if size & (size - 1):
        raise UnsupportedOperationError(
            f"op=hvd.Adasum combines pairs of ranks, then pairs of pairs: it needs 2, 4, 8 … "
            f"ranks, not {size}."
        )
