"""From processes that can tell one another a word to the ranks of every host.

Every rank tells its host and a token. Ranks of one host meet in shared memory, under the token of
the first of them; hosts are joined by Gloo or MPI. Nobody looks at names or at variables.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from roundelay.engines._base import Engine
from roundelay.engines._call import CollectiveCall
from roundelay.engines._selector import Select
from roundelay.engines.gloo import Gloo
from roundelay.engines.mpi import Mpi
from roundelay.engines.shared_memory import SharedMemory
from roundelay.errors import RendezvousError
from roundelay.rendezvous.by_store import await_all, rendezvous_at
from roundelay.rendezvous.hosts import host_identity, ranks_by_host
from roundelay.rendezvous.one_host import Job
from roundelay.rendezvous.store import Store
from roundelay.rendezvous.topology import HostTopology

__all__ = ["Meeting", "by_mpi", "by_store", "meet_inside"]

LONGEST = 8192  # bytes that a rank tells of itself


@dataclass(frozen=True, slots=True)
class Meeting:
    """How the ranks of a job find one another before they have an engine for all of them."""

    rank: int
    tell_all: Callable[[bytes], Sequence[bytes]]  # shows a word to all, and returns all words
    everyone: Callable[[], Engine]  # joins all ranks, whatever their hosts
    abort: Callable[[], None] | None = None  # ends the job, where nobody may end it alone


class _HostWord(msgspec.Struct, frozen=True):
    """What a rank tells all others: where it is, and how the ranks of its host would meet."""

    host: str
    token: str
    folder: str


_read = msgspec.json.Decoder(_HostWord).decode


def meet_inside(by: Meeting, select: Select, timeout: float) -> tuple[HostTopology, SharedMemory]:
    """Return which rank is where, and the engine of the ranks of this host."""
    mine = _HostWord(host_identity(), secrets.token_hex(16), tempfile.gettempdir())
    words = [_read(word) for word in by.tell_all(msgspec.json.encode(mine))]
    hosts = tuple(tuple(ranks) for ranks in ranks_by_host([word.host for word in words]))
    places = HostTopology(hosts, by.rank)
    first = words[places.here[0]]
    job = Job(f"joined\n{first.token}", len(places.here), Path(first.folder))
    inside = SharedMemory.of_host(job, places.local, select=select, timeout=timeout)
    inside.abort = by.abort or inside.abort
    return places, inside


def by_store(store: Store, rank: int, size: int, select: Select, timeout: float) -> Meeting:
    """Meet by a store that all ranks share, and have Gloo join the hosts."""

    def tell_all(word: bytes) -> list[bytes]:
        keys = [f"told/{other}" for other in range(size)]
        store.set(keys[rank], word)
        return await_all(store, keys, rank, size, timeout)

    def everyone() -> Engine:
        at = rendezvous_at(store, rank, size, several_hosts=True).within("gloo")
        return Gloo(at, select, timeout=timeout)

    return Meeting(rank, tell_all, everyone)


def by_mpi(select: Select, timeout: float) -> Meeting:
    """Meet by MPI, which joins the hosts too."""
    mpi = Mpi.of_world(select, timeout)
    return Meeting(mpi.rank, lambda word: _told_by_mpi(mpi, word), lambda: mpi, mpi.abort)


def _told_by_mpi(mpi: Engine, word: bytes) -> list[bytes]:
    if len(word) > LONGEST:
        raise RendezvousError(
            f"rank {mpi.rank} has a TMPDIR too long to be told: {len(word)} bytes."
        )
    mine = np.frombuffer(word.ljust(LONGEST), np.uint8)
    every = np.empty((mpi.size, LONGEST), np.uint8)
    mpi.run(CollectiveCall(
        "all_gather", "uint8", 1, LONGEST, every.nbytes, lambda: None, mine, every
    ), None)  # fmt: skip
    return [row.tobytes().rstrip() for row in every]
