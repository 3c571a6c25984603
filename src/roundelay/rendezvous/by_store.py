"""Where the processes of a group find one another by a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roundelay.rendezvous.store import Store

__all__ = ["StoreRendezvous"]


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
