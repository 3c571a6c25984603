"""The collectives that NCCL has itself, on tensors of a GPU, where they mean what ours mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from roundelay.engines._call import CollectiveCall
from roundelay.engines.gloo.calls import ADDED, BITS, OF_BOOLS, WORDS

__all__ = ["NcclCalls"]

TAKEN = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
NARROW = ("float16", "bfloat16")


@dataclass(slots=True)
class _Task:
    """A call in torch's words: flat tensors on the device."""

    call: CollectiveCall
    given: Any
    output: Any


class NcclCalls:
    """Runs calls on a process group for devices, for one rank."""

    def __init__(self, torch: Any, rank: int, size: int) -> None:
        self._torch, self._distributed = torch, torch.distributed
        self._rank, self._size = rank, size
        self._calls: dict[str, Callable[[Any, _Task], Any]] = {
            "all_reduce": self._all_reduce,
            "reduce": self._reduce,
            "reduce_scatter": self._reduce_scatter,
            "broadcast": self._broadcast,
            "all_gather": self._all_gather,
            "gather": self._gather,
            "all_to_all": self._all_to_all,
        }

    def run(self, group: Any, call: CollectiveCall, limit: timedelta) -> bool:
        """Run a call to its end, and tell whether the library could."""
        begin = self._calls.get(call.collective)
        if begin is None or not (sum(call.counts) or call.count):
            return False
        work = begin(group, _Task(call, _flat(call.input), _flat(call.output)))
        if work is None:
            return False
        work, finish = work if isinstance(work, tuple) else (work, None)
        # With a limit of its own, NCCL's wait returns when the data is there, or raises.
        work.wait(limit)
        if finish is not None:
            finish()
        return True

    # ---- reductions

    def _all_reduce(self, group: Any, task: _Task) -> Any:
        return self._reduced(task, task.given, task.output, lambda tensor, op: group.allreduce(
            [tensor], self._options("Allreduce", op)))  # fmt: skip

    def _reduce(self, group: Any, task: _Task) -> Any:
        def begin(tensor: Any, op: str) -> Any:
            options = self._options("Reduce", op)
            options.rootRank = task.call.root
            return group.reduce([tensor], options)

        return self._reduced(task, task.given, task.output, begin)

    def _reduced(
        self, task: _Task, given: Any, output: Any, begin: Callable[[Any, str], Any]
    ) -> Any:
        """Reduce a copy of what is given, in a dtype that the library adds, and hand it back."""
        word = _word(task.call.dtype, task.call.op)
        if word is None:
            return None
        worked = self._shown(given, word[0])
        worked = worked.clone() if worked.data_ptr() == given.data_ptr() else worked
        work = begin(worked, word[1])
        return work, lambda: self._hand_back(task, worked, output)

    def _reduce_scatter(self, group: Any, task: _Task) -> Any:
        word = _word(task.call.dtype, task.call.op)
        if word is None or task.call.counts:
            return None
        given = self._shown(task.given, word[0])
        made = given.new_empty(given.numel() // self._size)
        options = self._options("ReduceScatter", word[1])
        work = group._reduce_scatter_base(made, given, options)  # noqa: SLF001 - torch's name
        return work, lambda: self._hand_back(task, made, task.output)

    def _shown(self, tensor: Any, kind: str) -> Any:
        """Return a tensor as one of the dtype that the library is shown."""
        wanted = getattr(self._torch, kind)
        if tensor.dtype is wanted:
            return tensor
        if str(tensor.dtype).removeprefix("torch.") in NARROW:
            return tensor.to(wanted)  # so that a mean can't overflow before it is divided
        return tensor.view(wanted)

    def _hand_back(self, task: _Task, made: Any, output: Any) -> None:
        if output is None:
            return
        if task.call.op == "avg":
            made.div_(self._size)
        same = made.dtype is output.dtype or task.call.dtype in NARROW
        output.copy_(made if same else made.view(output.dtype))

    def _options(self, begin: str, op: str) -> Any:
        options = getattr(self._distributed, f"{begin}Options")()
        options.reduceOp = getattr(self._distributed.ReduceOp, op)
        return options

    # ---- movement

    def _broadcast(self, group: Any, task: _Task) -> Any:
        tensor = task.output if task.given is None else task.given
        return group.broadcast(self._octets(tensor), task.call.root)

    def _all_gather(self, group: Any, task: _Task) -> Any:
        if task.call.counts:
            return None
        output, given = self._octets(task.output), self._octets(task.given)
        return group._allgather_base(output, given)  # noqa: SLF001 - torch's name for it

    def _gather(self, group: Any, task: _Task) -> Any:
        if task.call.counts:
            return None
        options = self._distributed.GatherOptions()
        options.rootRank = task.call.root
        rows = [] if task.output is None else [list(self._octets(task.output).chunk(self._size))]
        return group.gather(rows, [self._octets(task.given)], options)

    def _all_to_all(self, group: Any, task: _Task) -> Any:
        call, size, rank = task.call, self._size, self._rank
        counts = list(call.counts) or [call.count] * size * size
        out = [count * call.item for count in counts[rank::size]]
        given = [count * call.item for count in counts[rank * size : (rank + 1) * size]]
        octets = self._octets(task.output), self._octets(task.given)
        return group.alltoall_base(*octets, out, given)

    def _octets(self, tensor: Any) -> Any:
        return tensor.view(self._torch.uint8)


def _flat(array: Any) -> Any:
    if array is None:
        return None
    # One element counts as contiguous whatever its stride, but is not seen as two floats then.
    return array.tensor.reshape(-1).contiguous().as_strided((array.tensor.numel(),), (1,))


def _word(dtype: str, op: str) -> tuple[str, str] | None:
    """Return the dtype and the reduction by which NCCL gives our result; None if it can't.

    >>> _word("bfloat16", "sum"), _word("float16", "avg"), _word("float32", "max")
    (('bfloat16', 'SUM'), ('float32', 'SUM'), None)
    """
    if dtype == "bool":
        op = OF_BOOLS.get(op, "")
        return ("uint8", WORDS[op]) if op in ("min", "max") else None
    if op == "avg":
        return ("float32" if dtype in NARROW else ADDED.get(dtype, dtype)), "SUM"
    if op not in WORDS or (op in ("band", "bor", "bxor")):
        return None
    shown = dtype
    if op == "sum":
        shown = ADDED.get(dtype, dtype)
    elif op == "prod":
        shown = BITS.get(dtype, dtype)
    elif "float" in dtype:
        return None  # NaN must win, and need not
    return (shown, WORDS[op]) if shown in TAKEN else None
