"""The collectives of a process group that only move data, under the names that torch calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

from roundelay.torch._calls import Calls, CommCall
from roundelay.torch._checks import lengths, one_each, times
from roundelay.torch._options import listed, nested, options
from roundelay.torch._tensors import beside, into, joined, memory, plain, rows, shared, units
from roundelay.torch._work import Work

Tensors = Sequence[Tensor]


class Moves(Calls):
    """What torch calls; `opts` is torch's struct of options, whose asyncOp says who waits."""

    def broadcast(
        self, tensors: Tensors | Tensor, opts: Any = None, *others: Any, **more: Any
    ) -> Work:
        """Fill a tensor on every rank with the root's."""
        opts = options(BroadcastOptions, opts, more, others)
        tensors = listed(tensors)
        steps = []
        for tensor in tensors:
            buffer, after = into("broadcast", tensor)
            steps.append(CommCall("broadcast", (buffer, opts.rootRank), {}, after))
        return self._call("broadcast", steps, tensors, waits=not opts.asyncOp)

    def allgather(
        self,
        outputs: Sequence[Tensors] | Tensors,
        inputs: Tensors | Tensor,
        opts: Any = None,
        **more: Any,
    ) -> Work:
        """Bring everybody's tensor to everybody, into a list of them; sizes may differ."""
        opts = options(AllgatherOptions, opts, more)
        lists, inputs = nested(outputs), listed(inputs)
        return self._all_gather("all_gather", lists, inputs, lists, opts)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """Do the same with several tensors; `outputs` is by rank, then by tensor."""
        opts = options(AllgatherOptions, opts, {})
        by_tensor = [[parts[number] for parts in outputs] for number in range(len(inputs))]
        return self._all_gather("all_gather_coalesced", by_tensor, inputs, outputs, opts)

    def _all_gather(
        self,
        name: str,
        lists: Sequence[Tensors],
        inputs: Tensors,
        outputs: Sequence[Tensors],
        opts: Any,
    ) -> Work:
        steps = [
            self._gathered("all_gather", parts, given)
            for parts, given in zip(lists, inputs, strict=True)
        ]
        flat = [tensor for parts in outputs for tensor in parts]
        return self._call(name, steps, flat, waits=not opts.asyncOp)

    def gather(
        self,
        outputs: Sequence[Tensors] | Tensors,
        inputs: Tensors | Tensor,
        opts: Any = None,
        *others: Any,
        **more: Any,
    ) -> Work:
        """Bring everybody's tensor to the root, into a list of them."""
        opts = options(GatherOptions, opts, more, others)
        (given,) = listed(inputs)
        if opts.rootRank == self.comm.rank:
            parts = nested(outputs)[0]
            steps = [self._gathered("gather", parts, given, opts.rootRank)]
            return self._call("gather", steps, parts, waits=not opts.asyncOp)
        data = memory("gather", plain("gather", given).contiguous())
        steps = [CommCall("gather", (data, opts.rootRank))]
        return self._call("gather", steps, (), waits=not opts.asyncOp)

    def _gathered(self, verb: str, outputs: Tensors, given: Tensor, *root: int) -> CommCall:
        one_each(verb, outputs, self.comm.size)
        data = memory(verb, plain(verb, given).contiguous())
        table, after = rows(verb, outputs)
        counts = [output.numel() * units(output) for output in outputs]
        if len(set(counts)) == 1:
            out = table.reshape(self.comm.size, counts[0])
            return CommCall(verb, (data, *root), {"out": out}, after)
        return CommCall(verb, (data, *root), {"axis": 0, "counts": counts, "out": table}, after)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002 - torch's name
        """Bring everybody's tensor to everybody, one after the other in one tensor."""
        return self._joined("all_gather_single", [output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Do the same with several tensors."""
        return self._joined("all_gather_single_coalesced", outputs, inputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _joined(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        opts = options(AllgatherOptions, opts, {})
        steps = []
        for output, given in zip(outputs, inputs, strict=True):
            times(name, output, given, self.comm.size)
            mine = plain(name, given)
            mine = beside(mine, mine, output, self.comm.rank)
            data = memory("all_gather", mine.contiguous())
            buffer, after = into("all_gather", output)
            out = buffer.reshape(self.comm.size, data.shape[0])
            steps.append(CommCall("all_gather", (data,), {"out": out}, after))
        return self._call(name, steps, outputs, waits=not opts.asyncOp)

    def scatter(
        self,
        outputs: Tensors | Tensor,
        inputs: Sequence[Tensors] | Tensors,
        opts: Any = None,
        *others: Any,
        **more: Any,
    ) -> Work:
        """Hand out the root's tensors, one to each rank."""
        opts = options(ScatterOptions, opts, more, others)
        outputs, given = listed(outputs), None
        buffer, after = into("scatter", outputs[0])
        if opts.rootRank == self.comm.rank:
            parts = nested(inputs)[0]
            one_each("scatter", parts, self.comm.size)
            for part in parts:
                times("scatter", part, outputs[0], 1)
            given = joined("scatter", parts).reshape(self.comm.size, buffer.shape[0])
        steps = [CommCall("scatter", (given, opts.rootRank), {"out": buffer}, after)]
        return self._call("scatter", steps, outputs, waits=not opts.asyncOp)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, **more: Any) -> Work:
        """Send the d-th tensor to rank d; sizes may differ."""
        opts = options(AllToAllOptions, opts, more)
        one_each("all_to_all", inputs, self.comm.size)
        one_each("all_to_all", outputs, self.comm.size)
        given = joined("all_to_all", inputs)
        counts = [tensor.numel() * units(tensor) for tensor in inputs]
        buffer, after = rows("all_to_all", outputs)
        return self._exchanged("all_to_all", given, counts, buffer, after, outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        **more: Any,
    ) -> Work:
        """Send rows of a tensor to every rank: the same number, or as many as the sizes say."""
        name, size = "all_to_all_single", self.comm.size
        opts = options(AllToAllOptions, opts, more)
        sent = lengths(name, input, input_split_sizes, size)
        lengths(name, output, output_split_sizes, size)
        given = plain(name, input)
        given = given.clone() if shared(given, output) else given
        data = memory("all_to_all", given.contiguous())
        buffer, after = into("all_to_all", output)
        if output_split_sizes or input_split_sizes:
            counts = [count * units(input) for count in sent]
            return self._exchanged(name, data, counts, buffer, after, [output], opts)
        times(name, output, input, 1)
        table, out = (one.reshape(size, one.shape[0] // size) for one in (data, buffer))
        steps = [CommCall("all_to_all", (table,), {"out": out}, after)]
        return self._call(name, steps, [output], waits=not opts.asyncOp)

    alltoall_base = all_to_all_single

    def _exchanged(
        self, name: str, data: Any, counts: list[int], out: Any, after: Any, outputs: Tensors,
        opts: Any,
    ) -> Work:  # fmt: skip
        """Send so many elements to each rank; a rank alone can't see whether all send the same."""
        shares = {"axis": 0, "counts": counts, "out": out}
        steps = [CommCall("all_to_all", (data,), shares, after, asks=True)]
        return self._call(name, steps, outputs, waits=not opts.asyncOp)

    def barrier(self, opts: Any = None, **more: Any) -> Work:
        """Return when every rank has come."""
        opts = options(BarrierOptions, opts, more)
        with self._limit(opts.timeout.total_seconds()):
            return self._call("barrier", [CommCall("barrier", ())], (), waits=not opts.asyncOp)

    @contextmanager
    def _limit(self, seconds: float) -> Iterator[None]:
        """Give calls another timeout meanwhile, if one is set."""
        if seconds <= 0:
            yield
            return
        usual, self.comm.timeout = self.comm.timeout, seconds
        try:
            yield
        finally:
            self.comm.timeout = usual
