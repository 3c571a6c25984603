"""Reductions of your own: everybody's data is brought together and folded in Python, in rank order.

Slower than the built-in ones, but exact, the same on all ranks, and fit for any associative
function, commutative or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from roundelay.communicator.buffers import bind
from roundelay.engines._end import Job
from roundelay.errors import InvalidArgumentError
from roundelay.reductions import Op, fold

if TYPE_CHECKING:
    from roundelay.communicator._communicator import Communicator

__all__ = ["OwnOps"]


class OwnOps:
    """The reducing calls of a communicator for an `rd.Op`."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def all_reduce(self, x: Any, op: Op, out: Any) -> Any:
        """Fold everybody's data on every rank."""
        return self._give(x, out, fold(op.reduction, list(self._all("all_reduce", x, op))))

    def reduce(self, x: Any, op: Op, root: int, out: Any) -> Any:
        """Fold everybody's data at the root."""
        jobs, array = self._comm._jobs, np.ascontiguousarray(self._plain("reduce", x))
        job = jobs.all_gather(array, None, None, None, call="gather", root=root)
        rows = self._run(job, "reduce", op)
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
        comm._jobs.shared("reduce_scatter", bound, axis, None)
        array = np.ascontiguousarray(self._plain("reduce_scatter", x))
        shape = (comm.size, *array.shape[1:]) if axis is None else (comm.size, -1, *array.shape[1:])
        job = comm._jobs.all_to_all(array.reshape(shape), None, None, None)
        job.axis = axis is not None
        shares = self._run(job, "reduce_scatter", op)
        folded = fold(op.reduction, list(shares))
        if out is None:
            return bound.wrap(folded)
        return self._give(x, out, folded)

    def _all(self, call: str, x: Any, op: Op) -> Any:
        array = np.ascontiguousarray(self._plain(call, x))
        return self._run(self._comm._jobs.all_gather(array, None, None, None), call, op)

    def _run(self, job: Job, call: str, op: Op) -> Any:
        """Bring the data together, as the call that it is for: ranks compare whose function."""
        job.call, job.own = call, op.identity
        return self._comm._now(job, None)

    def _plain(self, call: str, x: Any) -> Any:
        bound = bind(call, x)
        if bound.dtype == "bfloat16":
            raise InvalidArgumentError(
                f"{call}: your own reductions take no bfloat16; use float32."
            )
        return bound.array

    def _give(self, x: Any, out: Any, result: Any) -> Any:
        target = bind("the reduction", x if out is None else out)
        target.require_writable("the reduction", "result")
        if target.array.shape != result.shape or target.array.dtype != result.dtype:
            raise InvalidArgumentError(
                f"The reduction gives {result.dtype}{list(result.shape)}, but out= is "
                f"{target.array.dtype}{list(target.array.shape)}."
            )
        target.array[...] = result
        target.touched()
        return target.given
