"""Our own collectives as calls without arguments, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from roundelay.bench.workload import Buffers, Workload
from roundelay.communicator import Communicator

__all__ = ["Call", "ours"]

Call = Callable[[], object]


def ours(
    comm: Communicator, work: Workload, buffers: Buffers, *, algorithm: str | None = None
) -> Call:
    """Return the call of one rank on its buffers; by default the tuned algorithm."""
    x, out, root, here = buffers.input, buffers.output, work.root, comm.rank == work.root
    # Any: beside keywords of other types, as mypy sees it.
    forced: dict[str, Any] = {} if algorithm is None else {"algorithm": algorithm}
    rows = x.reshape(comm.size, -1) if here and work.collective == "scatter" else None
    calls: dict[str, Call] = {
        "all_gather": partial(comm.all_gather, x, out=out, axis=0, **forced),
        "all_reduce": partial(comm.all_reduce, x, work.op, **forced),
        "all_to_all": partial(comm.all_to_all, x, out=out, axis=0, **forced),
        "barrier": partial(comm.barrier, **forced),
        "broadcast": partial(comm.broadcast, x, root, **forced),
        "exscan": partial(comm.exscan, x, work.op, **forced),
        "gather": partial(comm.gather, x, root, out=out if here else None, axis=0, **forced),
        "reduce": partial(comm.reduce, x, work.op, root, **forced),
        "reduce_scatter": partial(comm.reduce_scatter, x, work.op, out=out, axis=0, **forced),
        "scan": partial(comm.scan, x, work.op, **forced),
        "scatter": partial(comm.scatter, rows, root, out=out, **forced),
    }
    return calls[work.collective]
