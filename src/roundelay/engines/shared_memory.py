"""Ranks as processes of this host that share memory: the default engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from roundelay import _core
from roundelay.engines._base import Engine, Select
from roundelay.engines._forked import Answer, ForkedHarness, Serve
from roundelay.engines._harness import Part
from roundelay.engines._native.engine import NativeEngine
from roundelay.engines._native.join import native_engine
from roundelay.engines._native.parts import call_native, fold_in_python, make_group
from roundelay.engines.hierarchical import Hierarchical
from roundelay.errors import InvalidArgumentError
from roundelay.processes.reports import run_forked
from roundelay.reductions import Array, Op
from roundelay.rendezvous.place import Place
from roundelay.rendezvous.store import OpenStore, no_store
from roundelay.schedule import Schedule, compile_schedule

__all__ = ["SharedMemory"]

OF_ONE_HOST = "The engine shared_memory joins the ranks of one host, but"


class SharedMemory(ForkedHarness):
    """Runs a schedule on the native core, one process per rank.

    The processes live on for as long as the same schedule is run.

    >>> import numpy as np
    >>> from roundelay.algorithms import algorithms
    >>> ring = algorithms.load("all_reduce_ring").schedule(4)
    >>> with SharedMemory() as engine:
    ...     engine.run(ring, [np.array([r, r]) for r in (1, 2, 3, 4)])[0]
    array([10, 10])
    """

    @classmethod
    def start(
        cls, size: int, body: Callable[[Engine], Any], *, select: Select, timeout: float
    ) -> list[Any]:
        """Fork the ranks."""
        selection = select(size)  # before the fork, so that all share it
        return run_forked(
            size, lambda world, rank: body(NativeEngine(world, rank, selection, timeout=timeout))
        )

    @classmethod
    def join(
        cls, place: Place, store: OpenStore = no_store, *, select: Select, timeout: float
    ) -> Engine:
        """Meet the ranks of this host; others there may not be."""
        if place.by == "store":
            raise InvalidArgumentError(
                f"{OF_ONE_HOST} this job has several. Leave engine out: then it is shared memory "
                f"inside every host and Gloo between them."
            )
        if place.by == "host":
            return native_engine(place.job, place.rank, select=select, timeout=timeout)
        joined = Hierarchical.join(place, store, select=select, timeout=timeout)
        if not isinstance(joined, NativeEngine):
            joined.close()
            raise InvalidArgumentError(
                f"{OF_ONE_HOST} mpirun started some elsewhere. Leave engine out: then it is shared "
                f"memory inside every host and MPI between them."
            )
        return joined

    def serve(self, schedule: Schedule, op: Op | None, until_closed: ExitStack) -> Serve:
        """Compile here, so that no fork need."""
        del until_closed
        programs = compile_schedule(schedule)

        @contextmanager
        def be_rank(world: _core.World, rank: int) -> Iterator[Answer]:
            group = make_group(world, rank)

            def answer(_: str, part: Part) -> Array | None:
                if op is None:
                    return call_native(group, programs, rank, part)
                return fold_in_python(world, group, schedule, rank, part, op.reduction)

            yield answer

        return be_rank
