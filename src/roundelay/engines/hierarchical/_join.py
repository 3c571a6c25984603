"""From processes that can tell one another a word to one engine, on one host or on many.

Every rank tells its host and a token. Ranks of one host meet in shared memory, under the token of
the first of them; hosts are joined by Gloo or MPI. Nobody looks at names or at variables.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from roundelay.engines._base import CollectiveCall, Engine, Select
from roundelay.engines._harness import Harness, Part
from roundelay.engines._native.engine import NativeEngine
from roundelay.engines._native.join import native_engine
from roundelay.engines.gloo.engine import GlooEngine
from roundelay.engines.hierarchical.engine import HierarchicalEngine
from roundelay.engines.mpi.engine import mpi_engine
from roundelay.errors import InvalidArgumentError, RendezvousError
from roundelay.reductions import Array, Op
from roundelay.rendezvous.by_store import await_all, rendezvous_at
from roundelay.rendezvous.hosts import host_identity, ranks_by_host
from roundelay.rendezvous.one_host import Job
from roundelay.rendezvous.place import Place
from roundelay.rendezvous.store import OpenStore, Store, no_store
from roundelay.rendezvous.topology import HostTopology
from roundelay.schedule import Schedule

__all__ = ["Hierarchical"]

LONGEST = 8192  # bytes that a rank tells of itself

#: Shows what a rank tells to all, and returns what all told.
TellAll = Callable[[bytes], Sequence[bytes]]


class Hierarchical(Harness):
    """Joins hosts: ranks share memory inside each, and Gloo or MPI carries data between them.

    Where all ranks are on one host, that is shared memory and nothing else.
    """

    @classmethod
    def join(
        cls, place: Place, store: OpenStore = no_store, *, select: Select, timeout: float
    ) -> Engine:
        """Return the engine of this rank, with MPI between hosts if it started the ranks."""
        if place.by == "mpi":
            mpi = mpi_engine(lambda size: select(size, cores=0).schedule_for, timeout)
            return _joined(
                mpi.rank, lambda word: _told_by_mpi(mpi, word), lambda: mpi, select, timeout
            )
        return cls.join_by_store(
            store(), place.rank, place.job.size, select=select, timeout=timeout
        )

    @staticmethod
    def join_by_store(
        store: Store, rank: int, size: int, *, select: Select, timeout: float
    ) -> Engine:
        """Return the engine of this rank among all that share a store."""

        def tell_all(word: bytes) -> list[bytes]:
            keys = [f"told/{other}" for other in range(size)]
            store.set(keys[rank], word)
            return await_all(store, keys, rank, size, timeout)

        def everyone() -> Engine:
            at = rendezvous_at(store, rank, size, several_hosts=True).within("gloo")
            return GlooEngine(at, lambda size: select(size, cores=0).schedule_for, timeout=timeout)

        return _joined(rank, tell_all, everyone, select, timeout)

    def outputs(
        self, schedule: Schedule, parts: Sequence[Part], op: Op | None
    ) -> Sequence[Array | None]:
        """Refuse: hosts are not to be had from here."""
        del parts, op
        raise InvalidArgumentError(
            f"The engine hierarchical joins hosts, and runs no {schedule.name} from outside. Start "
            f"ranks on several hosts, and call rd.init there."
        )


class _Told(msgspec.Struct, frozen=True):
    """What a rank tells all others: where it is, and how the ranks of its host would meet."""

    host: str
    token: str
    folder: str


_read = msgspec.json.Decoder(_Told).decode


def _joined(
    rank: int, tell_all: TellAll, everyone: Callable[[], Engine], select: Select, timeout: float
) -> Engine:
    mine = _Told(host_identity(), secrets.token_hex(16), tempfile.gettempdir())
    told = [_read(word) for word in tell_all(msgspec.json.encode(mine))]
    hosts = tuple(tuple(ranks) for ranks in ranks_by_host([each.host for each in told]))
    places = HostTopology(hosts, rank)
    inside = _inside(places, told[places.here[0]], select, timeout)
    return inside if len(hosts) == 1 else HierarchicalEngine(places, inside, everyone())


def _inside(places: HostTopology, first: _Told, select: Select, timeout: float) -> NativeEngine:
    """Meet the ranks of this host."""
    job = Job(f"joined\n{first.token}", len(places.here), Path(first.folder))
    return native_engine(job, places.local, select=select, timeout=timeout)


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
