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
from roundelay.communicator.native import NativeEnd
from roundelay.communicator.plans import schedule_for
from roundelay.engines._end import End, ScheduleFor
from roundelay.engines._hierarchical.engine import HierarchicalEnd
from roundelay.engines.gloo.engine import GlooEnd
from roundelay.engines.mpi.engine import mpi_communicator_end
from roundelay.errors import MeetingError
from roundelay.processes.world import make_world
from roundelay.rendezvous.hosts import address_towards, host_identity, ranks_by_host
from roundelay.rendezvous.meeting import Meeting
from roundelay.rendezvous.one_host import Job, meet
from roundelay.rendezvous.store import Store, StoreLost
from roundelay.rendezvous.topology import Places
from roundelay.tuning import host_tuning

__all__ = ["await_all", "join", "join_by_mpi", "meeting_at", "schedules"]


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
    return schedule_for(size, host_tuning(size, cores=0))


def join(store: Store, rank: int, size: int, *, timeout: float) -> End:
    """Return this rank's end of all that share a store: by hosts, Gloo between."""

    def tell_all(word: str) -> list[str]:
        keys = [f"told/{other}" for other in range(size)]
        store.set(keys[rank], word.encode())
        return [word.decode() for word in await_all(store, keys, rank, size, timeout)]

    def everyone() -> End:
        meeting = meeting_at(store, rank, size, several_hosts=True).within("gloo")
        return GlooEnd(meeting, schedules, timeout=timeout)

    return _joined(rank, timeout, tell_all, everyone)


def join_by_mpi(*, timeout: float) -> End:
    """Return this rank's end of all that mpirun started: by hosts, MPI between."""
    mpi = mpi_communicator_end(schedules, timeout)
    words = Communicator(mpi)
    return _joined(mpi.rank, timeout, words.all_gather_object, lambda: mpi)


def meeting_at(store: Store, rank: int, size: int, *, several_hosts: bool) -> Meeting:
    """Return where a Gloo group meets by a store.

    On one host torch's guess of an address will do. Between hosts it is the one that leads to the
    store, unless the user has named a network to torch.
    """
    if several_hosts and rank == 0 and not store.secret:
        sys.stderr.write(UNSIGNED)
    guessed = not several_hosts or "GLOO_SOCKET_IFNAME" in os.environ
    host = None if guessed else _server_of(store.raw)
    address = None if host is None else address_towards(host)
    return Meeting(store.live(rank, address), rank, size, address)


def _joined(
    rank: int,
    timeout: float,
    tell_all: Callable[[str], Sequence[str]],
    everyone: Callable[[], End],
) -> End:
    mine = _Told(host_identity(), secrets.token_hex(16), tempfile.gettempdir())
    words = tell_all(msgspec.json.encode(mine).decode())
    told = [_read(word) for word in words]
    hosts = tuple(tuple(ranks) for ranks in ranks_by_host([each.host for each in told]))
    places = Places(hosts, rank)
    inside = _native(places, told[places.here[0]], timeout)
    return inside if len(hosts) == 1 else HierarchicalEnd(places, inside, everyone())


def _native(places: Places, first: _Told, timeout: float) -> NativeEnd:
    """Meet the ranks of this host."""
    size = len(places.here)
    if size == 1:
        world = make_world(1)
        world.enter(0)
    else:
        job = Job(f"joined\n{first.token}", size, Path(first.folder))
        world = meet(job, places.local, timeout=timeout)
    return NativeEnd(world, places.local, tuning=host_tuning(size), timeout=timeout)


def _server_of(store: Any) -> str | None:
    """Return the host that serves a store; None for stores that no host serves."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def await_all(
    store: Store, keys: Sequence[str], rank: int, size: int, timeout: float, *, came: str = "come"
) -> list[bytes]:
    """Return the records of the first ranks, one for each key, or raise who did not come."""
    end = time.monotonic() + timeout
    try:
        return [store.get(key, end - time.monotonic()) for key in keys]
    except TimeoutError:
        missing = [str(other) for other, key in enumerate(keys) if not store.has(key)]
        raise MeetingError(
            f"rank {rank} of {size} waited {timeout:g} s, but rank {', '.join(missing)} did not "
            f"{came}. See whether it started, or allow more time with timeout."
        ) from None
    except StoreLost as lost:
        raise MeetingError(
            f"rank {rank} of {size} waited for the others, but {lost}: that host is gone, frozen "
            f"or cut off, or this one is cut off."
        ) from None
