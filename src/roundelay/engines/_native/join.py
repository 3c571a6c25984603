"""From a job of this host to the native engine of one of its ranks."""

from __future__ import annotations

from roundelay.engines._base import Select
from roundelay.engines._native.engine import NativeEngine
from roundelay.processes.world import make_world
from roundelay.rendezvous.one_host import Job, rendezvous

__all__ = ["native_engine"]


def native_engine(job: Job, rank: int, *, select: Select, timeout: float) -> NativeEngine:
    """Return the engine of a rank of this host, once all ranks of the job are there."""
    if job.size == 1:
        world = make_world(1)
        world.enter(0)
    else:
        world = rendezvous(job, rank, timeout=timeout)
    return NativeEngine(world, rank, select(job.size), timeout=timeout)
