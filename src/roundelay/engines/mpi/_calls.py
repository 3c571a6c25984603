"""MPI's own collectives, where it has one that means what ours does for this op and dtype.

It has none for halves, which we add in float32; its `min` and `max` may lose a NaN; its `maxloc`
knows places up to 2³¹ only; its products of complex numbers treat infinities by other rules; and
Open MPI's sums of 8 and 16 bits stop at the largest number, on CPUs with AVX, instead of wrapping.
What is missing here runs as a schedule over MPI's messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from roundelay.engines._call import CollectiveCall, divide
from roundelay.engines.mpi._progress import Requests, Steps
from roundelay.reductions import Array

LOGICAL = {"land": "LAND", "lor": "LOR", "lxor": "LXOR"}
NUMERIC = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX"}
BITWISE = {"band": "BAND", "bor": "BOR", "bxor": "BXOR"}
INTEGER = NUMERIC | LOGICAL | BITWISE
SHORT = {ours: theirs for ours, theirs in INTEGER.items() if ours != "sum"}
#: Bools saturate, and have one bit.
BOOL = {
    **dict.fromkeys(("sum", "max", "lor", "bor"), "LOR"),
    **dict.fromkeys(("prod", "min", "land", "band"), "LAND"),
    **dict.fromkeys(("lxor", "bxor"), "LXOR"),
}
FLOAT = {"sum": "SUM", "avg": "SUM", "prod": "PROD"}
COMPLEX = {"sum": "SUM", "avg": "SUM"}
#: By our dtype: MPI's, and MPI's op for each of ours that it has.
ABLE = {
    "bool": ("C_BOOL", BOOL),
    **{name: (f"{name.upper()}_T", SHORT) for name in ("int8", "int16", "uint8", "uint16")},
    **{name: (f"{name.upper()}_T", INTEGER) for name in ("int32", "int64", "uint32", "uint64")},
    "float32": ("FLOAT", FLOAT),
    "float64": ("DOUBLE", FLOAT),
    "complex64": ("C_FLOAT_COMPLEX", COMPLEX),
    "complex128": ("C_DOUBLE_COMPLEX", COMPLEX),
}
#: What only moves is bits: by the bytes of an element.
BITS = {1: "UINT8_T", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
MaybeArray = Array | None  # what a rank brings or gets, if anything
#: Begins a call on what goes in and what comes out, and gives MPI's requests.
Begin = Callable[[MaybeArray, MaybeArray], Iterable[Any]]
ELEMENTWISE = ("all_reduce", "reduce", "broadcast", "scan", "exscan")


class OwnCalls:
    """The collectives of one MPI communicator, begun without waiting."""

    def __init__(self, mpi: Any, comm: Any, most: int) -> None:  # without types, see load_mpi
        self._mpi, self._comm = mpi, comm
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self._most = most  # elements that one call can count

    def steps(self, call: CollectiveCall) -> Steps | None:
        """Return MPI's call for a call, None where it has none; the same on every rank."""
        if call.collective == "barrier":
            return self._call(call, lambda *_: [self._comm.Ibarrier()])
        if call.collective in REDUCING:
            kind, ops = ABLE.get(call.dtype, ("", {}))
            if call.op not in ops:
                return None
            op = getattr(self._mpi, ops[call.op])
        else:
            kind, op = BITS.get(call.item, ""), None
            if not kind:
                return None
        datatype = getattr(self._mpi, kind)
        if call.collective in ELEMENTWISE:
            return self._call(call, partial(self._elementwise, call, datatype, op))
        if _total(call) > self._most:
            return None
        return self._call(call, partial(self._blockwise, call, datatype, op))

    def _call(self, call: CollectiveCall, begin: Begin) -> Steps:
        given, output = _flat(call.input), _flat(call.output)
        if call.collective == "exscan" and self._rank == 0 and given is not None:
            # Rank 0's stays as it is with us; MPI may do with it what it likes.
            given = output = given.copy()
        if call.collective not in ELEMENTWISE and _same(given, output) and given is not None:
            given = given.copy()
        # mpi4py does not keep all memory of a call alive.
        yield [Requests(begin(given, output), given, output)]
        if call.op == "avg" and call.output is not None and call.collective in REDUCING:
            divide(call.output, self._size)

    def _elementwise(
        self, call: CollectiveCall, datatype: Any, op: Any, given: MaybeArray, output: MaybeArray
    ) -> Iterator[Any]:
        """Begin what treats every element alike, in pieces that MPI can count."""
        calls = {
            "all_reduce": self._comm.Iallreduce,
            "scan": self._comm.Iscan,
            "exscan": self._comm.Iexscan,
        }
        here, same = self._rank == call.root, _same(given, output)
        for start in range(0, call.count, self._most):
            run = slice(start, start + self._most)
            x = [None if given is None else given[run], datatype]
            out = [None if output is None else output[run], datatype]
            place = self._mpi.IN_PLACE if same else x
            if call.collective == "broadcast":
                yield self._comm.Ibcast(x if here else out, call.root)
            elif call.collective == "reduce":
                yield self._comm.Ireduce(place if here else x, out if here else None, op, call.root)
            else:
                yield calls[call.collective](place, out, op)

    def _blockwise(
        self, call: CollectiveCall, datatype: Any, op: Any, given: MaybeArray, output: MaybeArray
    ) -> list[Any]:
        """Begin what hands whole blocks around."""
        comm, here = self._comm, self._rank == call.root
        if not _total(call):
            return []
        x, out = [given, datatype], [output, datatype]
        if call.counts:
            return [self._uneven(call, datatype, op, given, output)]
        if call.collective == "scatter":
            return [comm.Iscatter(x if here else None, out, call.root)]
        if call.collective == "gather":
            return [comm.Igather(x, out if here else None, call.root)]
        if call.collective == "reduce_scatter":
            return [comm.Ireduce_scatter_block(x, out, op)]
        begin = comm.Iallgather if call.collective == "all_gather" else comm.Ialltoall
        return [begin(x, out)]

    def _uneven(
        self, call: CollectiveCall, datatype: Any, op: Any, given: MaybeArray, output: MaybeArray
    ) -> Any:
        comm, rank, size, counts = self._comm, self._rank, self._size, list(call.counts)
        x = [given, datatype]
        if call.collective == "scatter":
            rows = _lined_up(given, counts, datatype) if rank == call.root else None
            return comm.Iscatterv(rows, [output, datatype], call.root)
        if call.collective == "all_to_all":
            goes, comes = counts[rank * size : (rank + 1) * size], counts[rank::size]
            return comm.Ialltoallv(
                _lined_up(given, goes, datatype), _lined_up(output, comes, datatype)
            )
        if call.collective == "reduce_scatter":
            return comm.Ireduce_scatter(x, [output, datatype], counts, op)
        out = _lined_up(output, counts, datatype)
        if call.collective == "gather":
            return comm.Igatherv(x, out if rank == call.root else None, call.root)
        return comm.Iallgatherv(x, out)


def _total(call: CollectiveCall) -> int:
    """Count the elements of all blocks, or of one where all are equal."""
    return sum(call.counts) if call.counts else call.count


def _lined_up(array: Array | None, counts: list[int], datatype: Any) -> list[Any]:
    """Return blocks that lie one after the other, as mpi4py wants to be told."""
    return [array, counts, list(accumulate(counts[:-1], initial=0)), datatype]


def _flat(array: Array | None) -> Array | None:
    return None if array is None else array.reshape(-1)


def _same(one: Array | None, other: Array | None) -> bool:
    return one is not None and other is not None and np.may_share_memory(one, other)
