"""Ranks as processes of this host that share memory: the default engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from roundelay.engines import engines
from roundelay.engines._base import Engine
from roundelay.engines._native.engine import NativeEngine
from roundelay.engines._selector import Select
from roundelay.errors import InvalidArgumentError
from roundelay.processes.reports import run_forked
from roundelay.processes.world import make_world
from roundelay.rendezvous.one_host import Job, rendezvous
from roundelay.rendezvous.place import JobPlace
from roundelay.rendezvous.store import OpenStore, no_store

__all__ = ["SharedMemory"]

OF_ONE_HOST = "The engine shared_memory joins the ranks of one host, but"


class SharedMemory(NativeEngine):
    """A rank that is a process of this host, in memory that all its ranks share."""

    @classmethod
    def start(
        cls, size: int, body: Callable[[Engine], Any], *, select: Select, timeout: float
    ) -> list[Any]:
        """Fork the ranks."""
        selector = select(size)  # before the fork, so that all share it
        return run_forked(
            size, lambda world, rank: body(cls(world, rank, selector, timeout=timeout))
        )

    @classmethod
    def join(
        cls, place: JobPlace, store: OpenStore = no_store, *, select: Select, timeout: float
    ) -> Engine:
        """Meet the ranks of this host; others there may not be."""
        if place.by == "store":
            raise InvalidArgumentError(
                f"{OF_ONE_HOST} this job has several. Leave engine out: then it is shared memory "
                f"inside every host and Gloo between them."
            )
        if place.by == "host":
            return cls.of_host(place.job, place.rank, select=select, timeout=timeout)
        # MPI alone knows where its ranks are: perhaps all of them here.
        joined = engines.load("hierarchical").join(place, store, select=select, timeout=timeout)
        if not isinstance(joined, cls):
            joined.close()
            raise InvalidArgumentError(
                f"{OF_ONE_HOST} mpirun started some elsewhere. Leave engine out: then it is shared "
                f"memory inside every host and MPI between them."
            )
        return joined

    @classmethod
    def of_host(cls, job: Job, rank: int, *, select: Select, timeout: float) -> Self:
        """Return the engine of a rank of this host, once all ranks of the job are there."""
        if job.size == 1:
            world = make_world(1)
            world.enter(0)
        else:
            world = rendezvous(job, rank, timeout=timeout)
        return cls(world, rank, select(job.size), timeout=timeout)
