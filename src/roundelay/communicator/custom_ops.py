"""Reductions of your own: everybody's data is brought together and folded in Python, in rank order.

Slower than the built-in ones, but exact, the same on all ranks, and fit for any associative
function, commutative or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from roundelay.communicator.buffers import bind
from roundelay.engines import CollectiveCall
from roundelay.errors import InvalidArgumentError
from roundelay.reductions import Op, fold

if TYPE_CHECKING:
    from roundelay.communicator._communicator import Communicator

__all__ = ["CustomOps"]


class CustomOps:
    """The reducing calls of a communicator for an `rd.Op`."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def all_reduce(self, x: Any, op: Op, out: Any) -> Any:
        """Fold everybody's data on every rank."""
        return self._give(x, out, fold(op.reduction, list(self._all("all_reduce", x, op))))

    def reduce(self, x: Any, op: Op, root: int, out: Any) -> Any:
        """Fold everybody's data at the root."""
        build, array = self._comm._build, np.ascontiguousarray(self._plain("reduce", x))
        call = build.all_gather(array, None, None, None, name="gather", root=root)
        rows = self._run(call, "reduce", op)
        return None if rows is None else self._give(x, out, fold(op.reduction, list(rows)))

    def scan(self, x: Any, op: Op, out: Any, *, inclusive: bool) -> Any:
        """Fold the data of the ranks up to, or below, this one."""
        upto = self._comm.rank + inclusive
        rows = self._all("scan" if inclusive else "exscan", x, op)[:upto]
        return self._give(x, out, fold(op.reduction, list(rows))) if upto else x

    def reduce_scatter(
        self, x: Any, op: Op, out: Any, axis: int | None, counts: Sequence[int] | None
    ) -> Any:
        """Fold the share of the data that belongs to this rank."""
        comm = self._comm
        if counts is not None:
            raise InvalidArgumentError(
                "reduce_scatter with counts= takes built-in reductions only."
            )
        bound = bind("reduce_scatter", x)
        comm._build.shared("reduce_scatter", bound, axis, None)
        array = np.ascontiguousarray(self._plain("reduce_scatter", x))
        shape = (comm.size, *array.shape[1:]) if axis is None else (comm.size, -1, *array.shape[1:])
        call = comm._build.all_to_all(array.reshape(shape), None, None, None)
        call.axis = axis is not None
        shares = self._run(call, "reduce_scatter", op)
        folded = fold(op.reduction, list(shares))
        if out is None:
            return bound.wrap(folded)
        return self._give(x, out, folded)

    def _all(self, name: str, x: Any, op: Op) -> Any:
        array = np.ascontiguousarray(self._plain(name, x))
        return self._run(self._comm._build.all_gather(array, None, None, None), name, op)

    def _run(self, call: CollectiveCall, name: str, op: Op) -> Any:
        """Bring the data together, as the call that it is for: ranks compare whose function."""
        call.part_of, call.custom_op = name, op.identity
        return self._comm._run(call)

    def _plain(self, name: str, x: Any) -> Any:
        bound = bind(name, x)
        if bound.dtype == "bfloat16":
            raise InvalidArgumentError(
                f"{name}: your own reductions take no bfloat16; use float32."
            )
        return bound.array

    def _give(self, x: Any, out: Any, result: Any) -> Any:
        target = bind("the reduction", x if out is None else out)
        target.require_writable("the reduction", "result", or_out=out is None)
        if target.array.shape != result.shape or target.array.dtype != result.dtype:
            raise InvalidArgumentError(
                f"The reduction gives {result.dtype}{list(result.shape)}, but out= is "
                f"{target.array.dtype}{list(target.array.shape)}."
            )
        target.array[...] = result
        target.touched()
        return target.given
