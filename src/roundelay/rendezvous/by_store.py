"""Where the processes of a group find one another by a store."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roundelay.errors import RendezvousError
from roundelay.rendezvous.hosts import address_towards
from roundelay.rendezvous.store import Store, StoreLost

__all__ = ["UNSIGNED", "StoreRendezvous", "await_all", "rendezvous_at"]

UNSIGNED = (
    "roundelay: this job may have several hosts but has no secret, so whoever reaches them could "
    "take part. Set the same ROUNDELAY_SECRET on all hosts: openssl rand -hex 32\n"
)


@dataclass(frozen=True, slots=True)
class StoreRendezvous:
    """Where the processes of a group find one another, and which of them this one is."""

    store: Store
    rank: int
    size: int
    address: str | None = None  # of this host, as others reach it; None lets torch choose
    ranks: Sequence[int] = ()  # of the group, as the whole job numbers them; none if this is all

    def within(self, name: str, ranks: Sequence[int] | None = None) -> StoreRendezvous:
        """Return the meeting of a group of some of these ranks, or of all once more."""
        store = self.store.within(name)
        if ranks is None:
            return replace(self, store=store)
        whole = tuple(self.ranks[rank] if self.ranks else rank for rank in ranks)
        return StoreRendezvous(store, list(ranks).index(self.rank), len(ranks), self.address, whole)


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


def _server_of(store: Any) -> str | None:
    """Return the host that serves a store; None for stores that no host serves."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def await_all(
    store: Store,
    keys: Sequence[str],
    rank: int,
    size: int,
    timeout: float,
    *,
    came: str = "come",
    meanwhile: Callable[[], None] | None = None,
) -> list[bytes]:
    """Return the records of the first ranks, one for each key, or raise who did not come.

    Where that takes long, `meanwhile` is called ever again, and may raise.
    """
    deadline = time.monotonic() + timeout
    try:
        return [store.get(key, deadline - time.monotonic(), meanwhile) for key in keys]
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
