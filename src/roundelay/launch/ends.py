"""From the place that a launcher gave this process to its end of the group of all ranks."""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from roundelay.arguments import FOREVER_S
from roundelay.communicator.join import join, join_by_mpi, meeting_at, schedules
from roundelay.communicator.native import NativeEnd
from roundelay.engines import engines
from roundelay.engines._end import End
from roundelay.engines._gloo_end import GlooEnd
from roundelay.engines._mpi_end import mpi_communicator_end
from roundelay.engines._native import make_world
from roundelay.engines._nccl_end import NcclEnd
from roundelay.engines._rendezvous import meet
from roundelay.engines._torch_groups import load_torch
from roundelay.errors import InvalidArgumentError, MeetingError, UnknownNameError
from roundelay.launch.environment import Place, found_store
from roundelay.tuning import host_tuning

__all__ = ["JOINING", "check_engine", "end_for"]

LINGER_S = 5.0  # for ranks that end a little later than the one that serves the store
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


def end_for(engine: str | None, place: Place, environ: Mapping[str, str], *, timeout: float) -> End:
    """Return the end of this rank, once all ranks are there.

    Without an engine: shared memory where all ranks are on one host; else shared memory inside
    every host, and between them MPI if that started the ranks, Gloo if not.
    """
    timeout = min(timeout, FOREVER_S)  # sockets and stores know no infinity
    if engine == "mpi":
        return mpi_communicator_end(schedules, timeout)
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
        return join(_store(place, environ, timeout), place.rank, place.job.size, timeout=timeout)
    return _on_this_host(place, timeout)


def _on_this_host(place: Place, timeout: float) -> NativeEnd:
    if place.job.size == 1:
        world = make_world(1)
        world.enter(0)
    else:
        world = meet(place.job, place.rank, timeout=timeout)
    return NativeEnd(world, place.rank, tuning=host_tuning(world.size), timeout=timeout)


def _by_torch(engine: str, place: Place, environ: Mapping[str, str], timeout: float) -> End:
    kind: Callable[..., End] = GlooEnd if engine == "gloo" else NcclEnd
    rank, size = place.rank, place.job.size
    store = _store(place, environ, timeout)
    meeting = meeting_at(store, rank, size, several_hosts=place.by == "store")
    return kind(meeting.within(engine, rank, size), schedules, timeout=timeout)


def _store(place: Place, environ: Mapping[str, str], timeout: float) -> Any:  # of torch
    """Return torch's store of this job."""
    distributed = load_torch("gloo").distributed
    if place.job.size == 1:
        return distributed.HashStore()
    at = found_store(environ, place)
    limit = timedelta(seconds=timeout)
    try:
        # Several tenants: the script may call init_process_group with the same address.
        store = distributed.TCPStore(
            at.host, at.port, place.job.size, at.serves, limit, wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
    except RuntimeError as error:
        raise MeetingError(
            f"rank {place.rank} of {place.job.size} found no store at {at.host}:{at.port} within "
            f"{timeout:g} s: {str(error).splitlines()[0]} See whether rank 0 started there, and "
            f"whether the port is free and can be reached."
        ) from error
    corner = distributed.PrefixStore(at.corner, store)
    atexit.register(_say_done, corner, place, serves=at.serves)
    return corner


def _say_done(store: Any, place: Place, *, serves: bool) -> None:
    """Leave the store last if this process serves it: the others still say goodbye there."""
    keys = [f"done/{rank}" for rank in range(place.job.size)]
    with contextlib.suppress(RuntimeError):  # whoever served it is gone
        store.set(keys[place.rank], "1")
        end = time.monotonic() + LINGER_S
        while serves and not store.check(keys) and time.monotonic() < end:
            time.sleep(0.01)


def _check_not_by_mpi(engine: str, place: Place) -> None:
    if place.by == "mpi":
        raise InvalidArgumentError(
            f"mpirun started these ranks, but the engine {engine} needs torch's store. Start with "
            f"`roundelay run` or torchrun, or use engine='mpi'."
        )


def _only_here(end: End, engine: str | None) -> End:
    if engine == "shared_memory" and not isinstance(end, NativeEnd):
        end.close()
        raise InvalidArgumentError(
            "The engine shared_memory joins the ranks of one host, but mpirun started some "
            "elsewhere. Leave engine out: then it is shared memory inside every host and MPI "
            "between them."
        )
    return end
