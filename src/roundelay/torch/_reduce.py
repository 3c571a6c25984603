"""The reductions of a process group, under the names that torch calls, new and old."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOptions, ReduceScatterOptions
from torch.autograd import profiler

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, CommunicationError, UnsupportedReductionError
from roundelay.torch._calls import Calls, CommCall
from roundelay.torch._checks import one_each, times
from roundelay.torch._options import NAMES, PREMUL_SUM, listed, named, nested, options, scaled
from roundelay.torch._tensors import (
    Copy,
    beside,
    divide,
    into,
    joined,
    memory,
    plain,
    whole_numbers,
)
from roundelay.torch._work import DONE, Work

Tensors = Sequence[Tensor]


class Reductions(Calls):
    """What torch calls; `opts` is torch's struct of options, whose asyncOp says who waits."""

    def allreduce(self, tensors: Tensors | Tensor, opts: Any = None, **more: Any) -> Work:
        """Reduce a tensor over all ranks, in place."""
        if (
            type(opts) is AllreduceOptions
            and not opts.asyncOp
            and self._coalesced is None
            and not self._queue.busy
            and not profiler._is_profiler_enabled  # noqa: SLF001 - what record_function reads
        ):
            # Small ones are all alike, and many: nothing but the call.
            tensor, op = tensors[0], NAMES.get(hash(opts.reduceOp), PREMUL_SUM)
            dense = tensor.is_cpu and tensor.layout is torch.strided
            ours = op is not PREMUL_SUM and (op != "avg" or not whole_numbers(tensor))
            if dense and ours and tensor.is_contiguous():
                try:
                    self.comm.all_reduce(memory("all_reduce", tensor, reduces=True), op)
                except CommunicationError as error:
                    self._say_who(error)
                    raise
                return DONE
        opts = options(AllreduceOptions, opts, more)
        return self._all_reduce("all_reduce", listed(tensors), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce several tensors over all ranks, in place."""
        opts = options(AllreduceOptions, opts, {})
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: Tensors, opts: Any) -> Work:
        steps = [
            _sparse_sum(self.comm, tensor, named(opts.reduceOp))
            if tensor.is_sparse
            else self._in_place("all_reduce", tensor, opts.reduceOp)
            for tensor in tensors
        ]
        return self._call(name, steps, tensors, waits=not opts.asyncOp)

    def reduce(
        self, tensors: Tensors | Tensor, opts: Any = None, *others: Any, **more: Any
    ) -> Work:
        """Reduce a tensor to the root, in place there; elsewhere it stays as it is."""
        opts = options(ReduceOptions, opts, more, others)
        tensors = listed(tensors)
        steps = [
            self._in_place("reduce", tensor, opts.reduceOp, opts.rootRank) for tensor in tensors
        ]
        return self._call("reduce", steps, tensors, waits=not opts.asyncOp)

    def _in_place(self, call: str, tensor: Tensor, reduce_op: Any, *root: int) -> CommCall:
        op = named(reduce_op)
        if op is PREMUL_SUM:
            target = plain(call, tensor)
            product = scaled(reduce_op, target).contiguous()
            buffer, op = memory(call, product, reduces=True), "sum"
            after: Copy | None = partial(target.copy_, product)
        else:
            buffer, after = into(call, tensor, reduces=True)
            op, after = self._divided(op, tensor, buffer, after)
        here = not root or root[0] == self.comm.rank
        return CommCall(call, (buffer, op, *root), {}, after if here else None)

    def _divided(
        self, op: str, tensor: Tensor, buffer: Any, after: Copy | None
    ) -> tuple[str, Copy | None]:
        """Return the reduction, and what follows it: an average of integers is a sum, divided."""
        if op != "avg" or not whole_numbers(tensor):
            return op, after
        return "sum", partial(divide, buffer, self.comm.size, after)

    def reduce_scatter(
        self,
        outputs: Tensors | Tensor,
        inputs: Sequence[Tensors] | Tensors,
        opts: Any = None,
        **more: Any,
    ) -> Work:
        """Reduce a list with a tensor for every rank, and keep one's own; sizes may differ."""
        opts = options(ReduceScatterOptions, opts, more)
        outputs = listed(outputs)
        steps = []
        for output, parts in zip(outputs, nested(inputs), strict=True):
            one_each("reduce_scatter", parts, self.comm.size)
            given = joined("reduce_scatter", _multiplied(parts, opts.reduceOp), reduces=True)
            counts = [part.numel() for part in parts]
            steps.append(self._shared_out(given, output, counts, opts.reduceOp))
        return self._call("reduce_scatter", steps, outputs, waits=not opts.asyncOp)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002 - torch's name
        """Reduce a tensor, and keep one's share of it."""
        return self._scattered("reduce_scatter_single", [output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Reduce several tensors, and keep one's share of each."""
        return self._scattered("reduce_scatter_single_coalesced", outputs, inputs, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scattered(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        opts = options(ReduceScatterOptions, opts, {})
        steps = []
        for output, given in zip(outputs, inputs, strict=True):
            times(name, given, output, self.comm.size)
            (whole,) = _multiplied([plain(name, given)], opts.reduceOp)
            whole = beside(whole, output, whole, self.comm.rank)
            data = memory("reduce_scatter", whole.contiguous(), reduces=True)
            counts = [output.numel()] * self.comm.size
            steps.append(self._shared_out(data, output, counts, opts.reduceOp))
        return self._call(name, steps, outputs, waits=not opts.asyncOp)

    def _shared_out(
        self, given: Any, output: Tensor, counts: list[int], reduce_op: Any
    ) -> CommCall:
        op = named(reduce_op)
        op = "sum" if op is PREMUL_SUM else op
        buffer, after = into("reduce_scatter", output, reduces=True)
        op, after = self._divided(op, output, buffer, after)
        if len(set(counts)) == 1:
            table = given.reshape(self.comm.size, counts[0])
            return CommCall("reduce_scatter", (table, op), {"out": buffer}, after)
        shares = {"axis": 0, "counts": counts, "out": buffer}
        return CommCall("reduce_scatter", (given, op), shares, after)


def _multiplied(tensors: Tensors, reduce_op: Any) -> Tensors:
    if named(reduce_op) is not PREMUL_SUM:
        return tensors
    return [scaled(reduce_op, tensor) for tensor in tensors]


def _sparse_sum(comm: Communicator, tensor: Tensor, op: str) -> CommCall:
    """All-reduce a COO tensor, in place, as gloo does: what several ranks have is added up."""
    if op != "sum":
        raise UnsupportedReductionError(
            f"all_reduce of sparse tensors has sum only, not {op}. Pass tensor.to_dense()."
        )
    return CommCall("sparse_sum", (), run=partial(_add_sparse, comm, tensor))


def _add_sparse(comm: Communicator, tensor: Tensor) -> None:
    mine = tensor.detach().coalesce()
    shape = [*mine.shape, mine.sparse_dim()]
    # How much each rank has comes first, and whether they speak of the same tensor at all.
    table = comm.all_gather(np.array([mine.indices().shape[1], *shape], np.int64)).tolist()
    odd = [rank for rank, row in enumerate(table) if row[1:] != shape]
    if odd:
        raise CollectiveMismatch(
            f"all_reduce of sparse tensors needs one shape: rank {comm.rank} has {shape[:-1]}, "
            f"but ranks {odd} have others."
        )
    counts = [row[0] for row in table]
    indices = comm.all_gather(mine.indices().t().contiguous(), axis=0, counts=counts)
    values = comm.all_gather(mine.values().contiguous(), axis=0, counts=counts)
    with torch.no_grad():
        whole = torch.sparse_coo_tensor(indices.t(), values, mine.shape, check_invariants=False)
        tensor.copy_(whole.coalesce())
