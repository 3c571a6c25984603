"""The collectives that Gloo has itself, where they mean what ours mean.

Gloo takes few dtypes, so numbers are shown to it as others that behave alike: unsigned integers
add like signed ones, complex numbers like two reals, bools like bytes that are 0 or 1. What has no
such twin (halves, which Gloo would round at every addition; the smallest of floats, where NaN must
win) is left to schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from roundelay.engines._call import CollectiveCall
from roundelay.engines.gloo.groups import as_tensor
from roundelay.reductions import Array

__all__ = ["GlooCalls"]

Work = Any  # of torch

#: The dtype that Gloo is shown, for adding; others that it takes as they are.
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
WORDS = {
    "sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX",
    "band": "BAND", "bor": "BOR", "bxor": "BXOR",
}  # fmt: skip


def gloo_word(dtype: str, op: str) -> tuple[str, str] | None:
    """Return the dtype and the reduction by which Gloo gives our result; None if it can't.

    >>> gloo_word("float32", "avg"), gloo_word("bool", "land"), gloo_word("float32", "max")
    (('float32', 'SUM'), ('uint8', 'MIN'), None)
    """
    op = "sum" if op == "avg" else op
    if dtype == "bool":
        return ("uint8", WORDS[OF_BOOLS[op]]) if op in OF_BOOLS else None
    if op not in WORDS:
        return None
    shown = dtype
    if op == "sum":
        shown = ADDED.get(dtype, dtype)
    elif op in ("band", "bor", "bxor", "prod"):
        shown = BITS.get(dtype, dtype)
    elif dtype.startswith("float"):
        return None
    return (shown, WORDS[op]) if shown in TAKEN else None


class GlooCalls:
    """Runs calls on a process group of Gloo's, for one rank."""

    def __init__(self, torch: Any, rank: int, size: int) -> None:
        self._torch, self._distributed = torch, torch.distributed
        self._rank, self._size = rank, size
        self._calls: dict[str, Callable[[Any, CollectiveCall], Work | None]] = {
            "all_reduce": self._all_reduce,
            "reduce": self._reduce,
            "broadcast": self._broadcast,
            "all_gather": self._all_gather,
            "gather": self._gather,
            "scatter": self._scatter,
            "all_to_all": self._all_to_all,
            "barrier": lambda group, _: group.barrier(),
        }

    def run(self, group: Any, call: CollectiveCall) -> bool:
        """Run a call, and tell whether Gloo could."""
        begin = self._calls.get(call.collective)
        empty = call.collective != "barrier" and not (sum(call.counts) or call.count)
        if begin is None or self._size == 1 or empty:
            return False
        work = begin(group, call)
        if work is None:
            return False
        work.wait()
        if (
            call.op == "avg"
            and call.collective in ("all_reduce", "reduce")
            and call.output is not None
        ):
            divide(call.output, self._size)
        return True

    def _all_reduce(self, group: Any, call: CollectiveCall) -> Work | None:
        word = gloo_word(call.dtype, call.op)
        if word is None or call.output is None:
            return None
        _bring(call)
        return group.allreduce([self._seen(call.output, word[0])], self._options("Allreduce", word))

    def _reduce(self, group: Any, call: CollectiveCall) -> Work | None:
        word = gloo_word(call.dtype, call.op)
        if word is None or call.input is None:
            return None
        _bring(call)
        # Gloo leaves what it has added in the memory of every rank: elsewhere, in a copy.
        array = call.input.copy() if call.output is None else call.output
        options = self._options("Reduce", word)
        options.rootRank = call.root
        return group.reduce([self._seen(array, word[0])], options)

    def _options(self, begin: str, word: tuple[str, str]) -> Any:
        options = getattr(self._distributed, f"{begin}Options")()
        options.reduceOp = getattr(self._distributed.ReduceOp, word[1])
        return options

    def _broadcast(self, group: Any, call: CollectiveCall) -> Work | None:
        if call.output is None:
            return None
        _bring(call)
        return group.broadcast(self._seen(call.output), call.root)

    def _all_gather(self, group: Any, call: CollectiveCall) -> Work | None:
        if call.counts or call.output is None or call.input is None:
            return None
        output, given = self._seen(call.output), self._seen(call.input)
        return group._allgather_base(output, given)  # noqa: SLF001 - torch's name for it

    def _gather(self, group: Any, call: CollectiveCall) -> Work | None:
        if call.counts or call.input is None:
            return None
        options = self._distributed.GatherOptions()
        options.rootRank = call.root
        rows = [] if call.output is None else [list(self._seen(call.output).chunk(self._size))]
        return group.gather(rows, [self._seen(call.input)], options)

    def _scatter(self, group: Any, call: CollectiveCall) -> Work | None:
        if call.counts or call.output is None:
            return None
        options = self._distributed.ScatterOptions()
        options.rootRank = call.root
        rows = [] if call.input is None else [list(self._seen(call.input).chunk(self._size))]
        return group.scatter([self._seen(call.output)], rows, options)

    def _all_to_all(self, group: Any, call: CollectiveCall) -> Work | None:
        if call.input is None or call.output is None:
            return None
        size, rank = self._size, self._rank
        counts = list(call.counts) or [call.count] * size * size
        out = [count * call.item for count in counts[rank::size]]
        given = [count * call.item for count in counts[rank * size : (rank + 1) * size]]
        return group.alltoall_base(self._seen(call.output), self._seen(call.input), out, given)

    def _seen(self, array: Array, kind: str = "uint8") -> Any:
        return as_tensor(self._torch, array.reshape(-1).view(np.dtype(kind)))


def divide(array: Array, by: int) -> None:
    """Make a sum of floats or complex numbers the mean; a complex one as the two reals it is."""
    real = array.reshape(-1)
    real = real.view(real.real.dtype)
    real /= real.dtype.type(by)


def _bring(call: CollectiveCall) -> None:
    """Put what the rank gives where the result will be: Gloo works in place."""
    if call.input is not None and call.output is not None and call.input is not call.output:
        call.output.reshape(-1)[:] = call.input.reshape(-1)
