"""The collectives that NCCL has itself, on tensors of a GPU, where they mean what ours mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roundelay.engines._call import CollectiveCall
from roundelay.engines.gloo.calls import LibraryCalls, Work, library_word

TAKEN = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
NARROW = ("float16", "bfloat16")


class NcclCalls(LibraryCalls):
    """Runs calls on a process group for devices, for one rank."""

    def __init__(self, torch: Any, rank: int, size: int) -> None:
        super().__init__(torch, rank, size)
        self._calls["reduce_scatter"] = self._reduce_scatter

    def _all_reduce(self, group: Any, call: CollectiveCall) -> Work:
        return self._reduced(
            call, lambda tensor, op: group.allreduce([tensor], self._options("Allreduce", op))
        )

    def _reduce(self, group: Any, call: CollectiveCall) -> Work:
        return self._reduced(
            call,
            lambda tensor, op: group.reduce([tensor], self._options("Reduce", op, call.root)),
        )

    def _reduced(self, call: CollectiveCall, begin: Callable[[Any, str], Any]) -> Work:
        """Reduce a copy of what is given, in a dtype that the library adds, and hand it back."""
        word = _word(call)
        if word is None:
            return None
        given = _flat(call.input)
        copy = self._shown(given, word[0])
        copy = copy.clone() if copy.data_ptr() == given.data_ptr() else copy
        return begin(copy, word[1]), lambda: self._hand_back(call, copy)

    def _reduce_scatter(self, group: Any, call: CollectiveCall) -> Work:
        word = _word(call)
        if word is None or call.counts:
            return None
        given = self._shown(_flat(call.input), word[0])
        share = given.new_empty(given.numel() // self._size)
        options = self._options("ReduceScatter", word[1])
        work = group._reduce_scatter_base(share, given, options)  # noqa: SLF001 - torch's name
        return work, lambda: self._hand_back(call, share)

    def _shown(self, tensor: Any, kind: str) -> Any:
        """Return a tensor as one of the dtype that the library is shown."""
        wanted = getattr(self._torch, kind)
        if tensor.dtype is wanted:
            return tensor
        if str(tensor.dtype).removeprefix("torch.") in NARROW:
            return tensor.to(wanted)  # so that a mean can't overflow before it is divided
        return tensor.view(wanted)

    def _hand_back(self, call: CollectiveCall, result: Any) -> None:
        if call.output is None:
            return
        output = _flat(call.output)
        if call.op == "avg":
            result.div_(self._size)
        same = result.dtype is output.dtype or call.dtype in NARROW
        output.copy_(result if same else result.view(output.dtype))

    def _octets(self, array: Any) -> Any:
        return None if array is None else _flat(array).view(self._torch.uint8)


def _flat(array: Any) -> Any:
    # One element counts as contiguous whatever its stride, but is not seen as two floats then.
    return array.tensor.reshape(-1).contiguous().as_strided((array.tensor.numel(),), (1,))


def _word(call: CollectiveCall) -> tuple[str, str] | None:
    return library_word(call.dtype, call.op, TAKEN, narrow=NARROW, bitwise=False)
