"""From torch's store to a communicator: ranks tell one another where they are, and meet there.

A store is all that torch hands a backend: a small dictionary that every rank can reach. Each rank
writes its host and its list of ranks into it. If that is one host, rank 0 adds a word that nobody
can guess, and the ranks meet in shared memory under it. Several hosts are joined by Gloo.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from torch._C import _distributed_c10d as torch_store

from roundelay.communicator import Communicator
from roundelay.communicator.selection import Selection
from roundelay.engines.hierarchical import Hierarchical
from roundelay.engines.hierarchical.join import by_store
from roundelay.engines.shared_memory import SharedMemory
from roundelay.errors import CollectiveMismatch
from roundelay.rendezvous.by_store import await_all
from roundelay.rendezvous.one_host import Job
from roundelay.rendezvous.place import JobPlace
from roundelay.rendezvous.secret import found_secret
from roundelay.rendezvous.store import Store, open_store
from roundelay.torch._members import REACHED, Members

RENDEZVOUS = "meeting"


@dataclass(frozen=True, slots=True)
class Connected:
    """A communicator, and how to tell its other ranks that this one fails."""

    comm: Communicator
    fail: Callable[[str, str], None]  # "failed" or "interrupted", and by what
    token: str = ""  # that only its ranks know; none if there is one, or on several hosts


class _HostRendezvous(msgspec.Struct, frozen=True):
    """What rank 0 chose for the meeting of one host."""

    token: str
    folder: str


_read = msgspec.json.Decoder(_HostRendezvous).decode


def rendezvous_by_store(
    given: torch_store.Store,
    rank: int,
    size: int,
    *,
    timeout: float,
    ranks: Sequence[int] = (),
    world: str = "",
) -> Connected:
    """Return the communicator of the ranks that share this store. All of them call it.

    `ranks` are those of the group as all are numbered. `world` is the token of the group of all, in
    which this store belongs to one group, however late somebody looks.
    """
    alone = Job("alone", 1, Path())
    if size == 1 and not world:
        return _on_one_host(alone, rank, timeout)
    where = "the store of init_process_group"
    store = open_store(lambda: given, where, found_secret(os.environ), timeout).within("roundelay")
    store = store.within(world) if world else store
    members = Members(store, rank, size, ranks)
    if size == 1:
        with suppress(CollectiveMismatch):  # told to the others; alone is right, whatever they ask
            members.take_place()
        return _on_one_host(alone, rank, timeout)
    members.take_place()
    if len(set(members.hosts(timeout))) > 1:
        return _on_several_hosts(store, rank, size, timeout)
    if rank == 0:
        told = _HostRendezvous(secrets.token_hex(16), tempfile.gettempdir())
        store.set(RENDEZVOUS, msgspec.json.encode(told))
    told = _read(await_all(store, [RENDEZVOUS], rank, size, timeout, came=REACHED)[0])
    job = Job(f"torch\n{told.token}", size, Path(told.folder))
    connected = replace(_on_one_host(job, rank, timeout), token=told.token)
    if rank == 0:
        if world:
            members.leave_word()
        # So that a group of the same name, made later, finds nothing of this one.
        _forget(store, [*members.places, RENDEZVOUS])
    return connected


def _on_one_host(job: Job, rank: int, timeout: float) -> Connected:
    engine = SharedMemory.join(JobPlace(rank, job), select=Selection, timeout=timeout)
    return Connected(Communicator(engine), engine.fail)


def _on_several_hosts(store: Store, rank: int, size: int, timeout: float) -> Connected:
    """Join hosts: shared memory inside each, Gloo between; who fails is missed there."""
    meeting = by_store(store.within("hosts"), rank, size, Selection, timeout)
    engine = Hierarchical.joined(meeting, select=Selection, timeout=timeout)
    return Connected(Communicator(engine), lambda _word, _text: engine.close())


def _forget(store: Store, keys: list[str]) -> None:
    for key in keys:
        with suppress(Exception):  # not every store can delete, and none need
            store.forget(key)
