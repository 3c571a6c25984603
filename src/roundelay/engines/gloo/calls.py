"""The collectives that torch's process groups have themselves, where they mean what ours mean.

Libraries take few dtypes, so numbers are shown to them as others that behave alike: unsigned
integers add like signed ones, complex numbers like two reals, bools like bytes that are 0 or 1.
What has no such twin (halves, which Gloo would round at every addition; the smallest of floats,
where NaN must win) is left to schedules, and so is what they do quicker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

from roundelay.engines._call import CollectiveCall, divide
from roundelay.engines.gloo.groups import as_tensor
from roundelay.reductions import Array

__all__ = ["BETWEEN_TWO_FROM", "TWO", "GlooCalls", "LibraryCalls", "Work", "library_word"]

#: Of torch; what is begun, and what is to be done when it is over; None where the library can't.
Work = tuple[Any, Callable[[], None] | None] | None

#: The dtype that a library is shown, for adding; others that it takes as they are.
ADDED = {
    "uint32": "int32", "uint64": "int64", "complex64": "float32", "complex128": "float64",
}  # fmt: skip
TAKEN = ("int8", "uint8", "int32", "int64", "float32", "float64")
BITS = {"uint32": "int32", "uint64": "int64"}
#: What bools do, as bytes that are 0 or 1.
OF_BOOLS = {
    "sum": "max", "max": "max", "lor": "max", "bor": "max",
    "prod": "min", "min": "min", "land": "min", "band": "min",
    "lxor": "bxor", "bxor": "bxor",
}  # fmt: skip
BITWISE = ("band", "bor", "bxor")
#: From so many bytes on, a schedule between two ranks takes less of their cores than Gloo's ring.
TWO, BETWEEN_TWO_FROM = 2, 1 << 20
WORDS = {
    "sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX",
    "band": "BAND", "bor": "BOR", "bxor": "BXOR",
}  # fmt: skip


def library_word(
    dtype: str, op: str, taken: tuple[str, ...], *, narrow: tuple[str, ...] = (), bitwise: bool
) -> tuple[str, str] | None:
    """Return the dtype and the reduction by which a library gives our result; None if it can't.

    Means of `narrow` dtypes are added in float32.

    >>> word = lambda dtype, op: library_word(dtype, op, TAKEN, bitwise=True)
    >>> word("float32", "avg"), word("bool", "land"), word("float32", "max")
    (('float32', 'SUM'), ('uint8', 'MIN'), None)
    """
    if op == "avg":
        op, dtype = "sum", "float32" if dtype in narrow else dtype
    if dtype == "bool":
        op, dtype = OF_BOOLS.get(op, ""), "uint8"
    if op not in WORDS or (op in BITWISE and not bitwise):
        return None
    if op in ("min", "max") and "float" in dtype:
        return None  # NaN must win, and need not
    alike = ADDED if op == "sum" else {} if op in ("min", "max") else BITS
    shown = alike.get(dtype, dtype)
    return (shown, WORDS[op]) if shown in taken else None


class LibraryCalls(ABC):
    """Runs calls on a process group of torch's, for one rank."""

    def __init__(self, torch: Any, rank: int, size: int) -> None:
        self._torch, self._distributed = torch, torch.distributed
        self._rank, self._size = rank, size
        self._calls: dict[str, Callable[[Any, CollectiveCall], Work]] = {
            "all_reduce": self._all_reduce,
            "reduce": self._reduce,
            "broadcast": self._broadcast,
            "all_gather": self._all_gather,
            "gather": self._gather,
            "all_to_all": self._all_to_all,
        }

    def run(self, group: Any, call: CollectiveCall, limit: timedelta | None = None) -> bool:
        """Run a call to its end, and tell whether the library could."""
        begin = self._calls.get(call.collective)
        empty = call.collective != "barrier" and not (sum(call.counts) or call.count)
        if begin is None or empty or (begun := begin(group, call)) is None:
            return False
        work, finish = begun
        # With a limit of its own, NCCL's wait returns when the data is there, or raises.
        work.wait(*(() if limit is None else (limit,)))
        if finish is not None:
            finish()
        return True

    @abstractmethod
    def _all_reduce(self, group: Any, call: CollectiveCall) -> Work:
        """Begin an all-reduce."""

    @abstractmethod
    def _reduce(self, group: Any, call: CollectiveCall) -> Work:
        """Begin a reduce."""

    @abstractmethod
    def _octets(self, array: Array | None) -> Any:
        """Return the memory of an array as a tensor of bytes."""

    def _options(self, begin: str, op: str | None = None, root: int | None = None) -> Any:
        options = getattr(self._distributed, f"{begin}Options")()
        if op is not None:
            options.reduceOp = getattr(self._distributed.ReduceOp, op)
        if root is not None:
            options.rootRank = root
        return options

    def _broadcast(self, group: Any, call: CollectiveCall) -> Work:
        _bring(call)
        return group.broadcast(self._octets(call.output), call.root), None

    def _all_gather(self, group: Any, call: CollectiveCall) -> Work:
        if call.counts:
            return None
        output, given = self._octets(call.output), self._octets(call.input)
        return group._allgather_base(output, given), None  # noqa: SLF001 - torch's name for it

    def _gather(self, group: Any, call: CollectiveCall) -> Work:
        if call.counts:
            return None
        options = self._options("Gather", root=call.root)
        return group.gather(self._rows(call.output), [self._octets(call.input)], options), None

    def _rows(self, array: Array | None) -> list[list[Any]]:
        return [] if array is None else [list(self._octets(array).chunk(self._size))]

    def _all_to_all(self, group: Any, call: CollectiveCall) -> Work:
        size, rank = self._size, self._rank
        counts = list(call.counts) or [call.count] * size * size
        out = [count * call.item for count in counts[rank::size]]
        given = [count * call.item for count in counts[rank * size : (rank + 1) * size]]
        octets = self._octets(call.output), self._octets(call.input)
        return group.alltoall_base(*octets, out, given), None


class GlooCalls(LibraryCalls):
    """Runs calls on a process group of Gloo's, which works in place."""

    def __init__(self, torch: Any, rank: int, size: int) -> None:
        super().__init__(torch, rank, size)
        self._calls["scatter"] = self._scatter
        self._calls["barrier"] = lambda group, _: (group.barrier(), None)
        if size == 1:
            self._calls.clear()

    def _all_reduce(self, group: Any, call: CollectiveCall) -> Work:
        word = library_word(call.dtype, call.op, TAKEN, bitwise=True)
        between_two = self._size == TWO and call.nbytes >= BETWEEN_TWO_FROM
        if word is None or call.output is None or between_two:
            return None
        _bring(call)
        options = self._options("Allreduce", word[1])
        return group.allreduce([self._seen(call.output, word[0])], options), self._mean(call)

    def _reduce(self, group: Any, call: CollectiveCall) -> Work:
        word = library_word(call.dtype, call.op, TAKEN, bitwise=True)
        if word is None or call.input is None:
            return None
        _bring(call)
        # Gloo leaves what it has added in the memory of every rank: elsewhere, in a copy.
        array = call.input.copy() if call.output is None else call.output
        options = self._options("Reduce", word[1], call.root)
        return group.reduce([self._seen(array, word[0])], options), self._mean(call)

    def _mean(self, call: CollectiveCall) -> Callable[[], None] | None:
        """Return what makes a sum the mean, where that is asked for."""
        output = call.output
        return None if call.op != "avg" or output is None else lambda: divide(output, self._size)

    def _scatter(self, group: Any, call: CollectiveCall) -> Work:
        if call.counts:
            return None
        options = self._options("Scatter", root=call.root)
        return group.scatter([self._octets(call.output)], self._rows(call.input), options), None

    def _octets(self, array: Array | None) -> Any:
        return None if array is None else self._seen(array, "uint8")

    def _seen(self, array: Array, kind: str) -> Any:
        return as_tensor(self._torch, array.reshape(-1).view(np.dtype(kind)))


def _bring(call: CollectiveCall) -> None:
    """Put what the rank gives where the result will be."""
    if call.input is not None and call.output is not None and call.input is not call.output:
        call.output.reshape(-1)[:] = call.input.reshape(-1)
