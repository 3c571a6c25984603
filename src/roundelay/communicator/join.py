"""From processes that can tell one another a word to one end of a group, on one host or on many.

Every rank tells its host and a token. Ranks of one host meet in shared memory, under the token of
the first of them; hosts are joined by Gloo or MPI. Nobody looks at names or at variables.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from roundelay.communicator._communicator import Communicator
from roundelay.communicator.selection import Selection
from roundelay.engines import Engine, ScheduleFor
from roundelay.engines._hierarchical.engine import HierarchicalEngine
from roundelay.engines._native.engine import NativeEngine
from roundelay.engines.gloo.engine import GlooEngine
from roundelay.engines.mpi.engine import mpi_engine
from roundelay.errors import RendezvousError
from roundelay.processes.world import make_world
from roundelay.rendezvous.by_store import StoreRendezvous
from roundelay.rendezvous.hosts import address_towards, host_identity, ranks_by_host
from roundelay.rendezvous.one_host import Job, rendezvous
from roundelay.rendezvous.store import Store, StoreLost
from roundelay.rendezvous.topology import HostTopology

__all__ = ["await_all", "join", "join_by_mpi", "rendezvous_at", "schedules"]


UNSIGNED = (
    "roundelay: this job may have several hosts but has no secret, so whoever reaches them could "
    "take part. Set the same ROUNDELAY_SECRET on all hosts: openssl rand -hex 32\n"
)


class _Told(msgspec.Struct, frozen=True):
    """What a rank tells all others: where it is, and how the ranks of its host would meet."""

    host: str
    token: str
    folder: str


_read = msgspec.json.Decoder(_Told).decode


def schedules(size: int) -> ScheduleFor:
    """Return what finds schedules for so many ranks, for engines that walk them."""
    return Selection(size, cores=0).schedule_for


def join(store: Store, rank: int, size: int, *, timeout: float) -> Engine:
    """Return this rank's end of all that share a store: by hosts, Gloo between."""

    def tell_all(word: str) -> list[str]:
        keys = [f"told/{other}" for other in range(size)]
        store.set(keys[rank], word.encode())
        return [word.decode() for word in await_all(store, keys, rank, size, timeout)]

    def everyone() -> Engine:
        rendezvous = rendezvous_at(store, rank, size, several_hosts=True).within("gloo")
        return GlooEngine(rendezvous, schedules, timeout=timeout)

    return _joined(rank, timeout, tell_all, everyone)


def join_by_mpi(*, timeout: float) -> Engine:
    """Return this rank's end of all that mpirun started: by hosts, MPI between."""
    mpi = mpi_engine(schedules, timeout)
    words = Communicator(mpi)
    return _joined(mpi.rank, timeout, words.all_gather_object, lambda: mpi)


def rendezvous_at(store: Store, rank: int, size: int, *, several_hosts: bool) -> StoreRendezvous:
    """Return where a Gloo group meets by a store.

    On one host torch's guess of an address will do. Between hosts it is the one that leads to the
    store, unless the user has named a network to torch.
    """
    if several_hosts and rank == 0 and not store.secret:
        sys.stderr.write(UNSIGNED)
    guessed = not several_hosts or "GLOO_SOCKET_IFNAME" in os.environ
    host = None if guessed else _server_of(store.raw)
    address = None if host is None else address_towards(host)
    return StoreRendezvous(store.live(rank, address), rank, size, address)


def _joined(
    rank: int,
    timeout: float,
    tell_all: Callable[[str], Sequence[str]],
    everyone: Callable[[], Engine],
) -> Engine:
    mine = _Told(host_identity(), secrets.token_hex(16), tempfile.gettempdir())
    words = tell_all(msgspec.json.encode(mine).decode())
    told = [_read(word) for word in words]
    hosts = tuple(tuple(ranks) for ranks in ranks_by_host([each.host for each in told]))
    places = HostTopology(hosts, rank)
    inside = _native(places, told[places.here[0]], timeout)
    return inside if len(hosts) == 1 else HierarchicalEngine(places, inside, everyone())


def _native(places: HostTopology, first: _Told, timeout: float) -> NativeEngine:
    """Meet the ranks of this host."""
    size = len(places.here)
    if size == 1:
        world = make_world(1)
        world.enter(0)
    else:
        job = Job(f"joined\n{first.token}", size, Path(first.folder))
        world = rendezvous(job, places.local, timeout=timeout)
    return NativeEngine(world, places.local, Selection(size), timeout=timeout)


def _server_of(store: Any) -> str | None:
    """Return the host that serves a store; None for stores that no host serves."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def await_all(
    store: Store, keys: Sequence[str], rank: int, size: int, timeout: float, *, came: str = "come"
) -> list[bytes]:
    """Return the records of the first ranks, one for each key, or raise who did not come."""
    deadline = time.monotonic() + timeout
    try:
        return [store.get(key, deadline - time.monotonic()) for key in keys]
    except TimeoutError:
        missing = [str(other) for other, key in enumerate(keys) if not store.has(key)]
        raise RendezvousError(
            f"rank {rank} of {size} waited {timeout:g} s, but rank {', '.join(missing)} did not "
            f"{came}. See whether it started, or allow more time with timeout."
        ) from None
    except StoreLost as lost:
        raise RendezvousError(
            f"rank {rank} of {size} waited for the others, but {lost}: that host is gone, frozen "
            f"or cut off, or this one is cut off."
        ) from None
