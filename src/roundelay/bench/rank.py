"""What one measuring rank does: make buffers, time everybody, and report if it is rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np

from roundelay.bench.messages import (
    ARENA,
    OURS,
    PEERS,
    REGISTERED,
    Case,
    CaseResult,
    Message,
    PeerVersions,
    Spec,
)
from roundelay.bench.rounds import Contender, buffers_for, memory_pass, time_all
from roundelay.bench.workload import Buffers, Call, Workload, least_traffic
from roundelay.communicator import Communicator
from roundelay.reductions import Array

__all__ = ["Peer", "be_rank"]

#: Below this, a pass over memory is mostly the call that starts it.
FLOOR_FROM = 64 * 1024
FLOOR = "memory"  # takes its turn in every round, like a contender


class Peer(Protocol):
    """Another library on the same ranks."""

    @property
    def version(self) -> str:
        """Name the library that really runs."""

    def call(self, work: Workload, buffers: Buffers) -> Call | None:
        """Return its call on these buffers, None where it has none."""


def be_rank(
    comm: Communicator, spec: Spec, peers: Mapping[str, Peer], report: Callable[[Message], None]
) -> None:
    """Measure all cases; `report` is called on rank 0 only."""
    if comm.rank == 0:
        report(PeerVersions({name: peer.version for name, peer in peers.items()}))
    for case in spec.cases:
        row = _measure(comm, spec, case, peers)
        if comm.rank == 0:
            report(row)


def _measure(comm: Communicator, spec: Spec, case: Case, peers: Mapping[str, Peer]) -> CaseResult:
    work = Workload.of(
        case.collective,
        case.nbytes,
        rank=comm.rank,
        size=comm.size,
        dtype=spec.dtype,
        op=spec.op,
        root=spec.root,
    )
    shared = [work.make() for _ in range(buffers_for(work.nbytes))]
    source = work.make().input
    contenders = {}
    for name in spec.contenders:
        contender = _contender(comm, work, name, peers, shared, source)
        # A peer may lack this call on some dtype: all ranks find the same.
        if contender is not None:
            contenders[name] = contender
    if spec.floor and work.nbytes >= FLOOR_FROM:
        contenders[FLOOR] = memory_pass(comm.size, work.nbytes)
    timings = time_all(comm, work, contenders, spec, unchecked=FLOOR)
    passed, floor = timings.pop(FLOOR, None), None
    if passed is not None:
        needed = least_traffic(work.collective, comm.size, work.root, work.nbytes)
        floor = needed * passed.seconds / (2 * comm.size * work.nbytes)
    return CaseResult(case.collective, work.nbytes, work.count, timings, floor)


def _contender(
    comm: Communicator,
    work: Workload,
    name: str,
    peers: Mapping[str, Peer],
    shared: list[Buffers],
    source: Array,
) -> Contender | None:
    if name in PEERS:
        calls = [peers[name].call(work, buffers) for buffers in shared]
        able = [call for call in calls if call is not None]
        return Contender(shared, able, source) if len(able) == len(shared) else None
    buffers = shared
    if name in (ARENA, REGISTERED):
        buffers = [work.make(comm.empty if name == ARENA else np.empty) for _ in shared]
    if name == REGISTERED:
        comm.register([array for each in buffers for array in (each.input, each.output)])
    algorithm = None if name in (OURS, ARENA, REGISTERED) else name
    own = [_ours(comm, work, each, algorithm=algorithm) for each in buffers]
    return Contender(buffers, own, source)


def _ours(
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
