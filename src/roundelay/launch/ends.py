"""From the place that a launcher gave this process to its engine, with all ranks in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from roundelay.arguments import FOREVER_S
from roundelay.communicator.join import join, join_by_mpi, rendezvous_at, schedules
from roundelay.communicator.selection import Selection
from roundelay.engines import Engine, engines
from roundelay.engines._native.engine import NativeEngine
from roundelay.engines.gloo.engine import GlooEngine
from roundelay.engines.mpi.engine import mpi_engine
from roundelay.engines.nccl.engine import NcclEngine
from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.launch.environment import Place
from roundelay.launch.store import job_store
from roundelay.processes.world import make_world
from roundelay.rendezvous.one_host import rendezvous

__all__ = ["JOINING", "check_engine", "engine_for"]

#: Engines that join processes which somebody else started.
JOINING = ("gloo", "mpi", "nccl", "shared_memory")


def check_engine(engine: str | None) -> None:
    """Refuse an engine that joins no processes."""
    named = isinstance(engine, str)
    if engine is None or (named and engine in JOINING):
        return
    if named and engine in engines.names():
        raise InvalidArgumentError(
            f"init joins processes that a launcher started, with one of the engines "
            f"{', '.join(JOINING)}; for {engine} see rd.run."
        )
    raise UnknownNameError("engines", str(engine), JOINING)


def engine_for(
    engine: str | None, place: Place, environ: Mapping[str, str], *, timeout: float
) -> Engine:
    """Return the engine of this rank, once all ranks are there.

    Without an engine: shared memory where all ranks are on one host; else shared memory inside
    every host, and between them MPI if that started the ranks, Gloo if not.
    """
    timeout = min(timeout, FOREVER_S)  # sockets and stores know no infinity
    if engine == "mpi":
        return mpi_engine(schedules, timeout)
    if engine in ("gloo", "nccl"):
        _check_not_by_mpi(engine, place)
        return _by_torch(engine, place, environ, timeout)
    if engine == "shared_memory" and place.by == "store":
        raise InvalidArgumentError(
            "The engine shared_memory joins the ranks of one host, but this job has several. "
            "Leave engine out: then it is shared memory inside every host and Gloo between them."
        )
    if place.by == "mpi":
        return _only_here(join_by_mpi(timeout=timeout), engine)
    if place.by == "store":
        return join(job_store(place, environ, timeout), place.rank, place.job.size, timeout=timeout)
    return _on_this_host(place, timeout)


def _on_this_host(place: Place, timeout: float) -> NativeEngine:
    if place.job.size == 1:
        world = make_world(1)
        world.enter(0)
    else:
        world = rendezvous(place.job, place.rank, timeout=timeout)
    return NativeEngine(world, place.rank, Selection(world.size), timeout=timeout)


def _by_torch(engine: str, place: Place, environ: Mapping[str, str], timeout: float) -> Engine:
    kind: Callable[..., Engine] = GlooEngine if engine == "gloo" else NcclEngine
    rank, size = place.rank, place.job.size
    store = job_store(place, environ, timeout)
    rendezvous = rendezvous_at(store, rank, size, several_hosts=place.by == "store")
    return kind(rendezvous.within(engine), schedules, timeout=timeout)


def _check_not_by_mpi(engine: str, place: Place) -> None:
    if place.by == "mpi":
        raise InvalidArgumentError(
            f"mpirun started these ranks, but the engine {engine} needs torch's store. Start with "
            f"`roundelay run` or torchrun, or use engine='mpi'."
        )


def _only_here(engine: Engine, name: str | None) -> Engine:
    if name == "shared_memory" and not isinstance(engine, NativeEngine):
        engine.close()
        raise InvalidArgumentError(
            "The engine shared_memory joins the ranks of one host, but mpirun started some "
            "elsewhere. Leave engine out: then it is shared memory inside every host and MPI "
            "between them."
        )
    return engine
