"""Whether all ranks mean the same group: each writes down its list, and reads those of the others.

Torch compares nothing. It numbers the groups of a program, and ranks that ask for the same number
meet, whatever lists they gave. So each rank of a group takes its place there in the store, with its
list. A place that another rank has taken, and a list that differs, is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from roundelay.arguments import shown
from roundelay.errors import CollectiveMismatch, ranks_text
from roundelay.rendezvous.by_store import await_all
from roundelay.rendezvous.hosts import host_identity
from roundelay.rendezvous.store import Store

__all__ = ["REACHED", "Members"]

MADE = "made"  # by whom, for ranks that come when all else is forgotten
REACHED = "reach init_process_group or new_group"


class _Member(msgspec.Struct, frozen=True):
    """What a rank tells the others of itself."""

    rank: int  # of all
    ranks: list[int]  # of the group, as it was asked for; none if that is all
    host: str


_read = msgspec.json.Decoder(_Member).decode


class Members:
    """The places of a group in its store, of which this rank has one."""

    def __init__(self, store: Store, rank: int, size: int, ranks: Sequence[int]) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._mine = _Member(ranks[rank] if ranks else rank, list(ranks), host_identity())
        self.places = [f"host/{other}" for other in range(size)]
        #: Where those that this rank waits for say that their places are taken.
        self._displaced = [f"displaced/{other}" for other in ranks]

    def take_place(self) -> None:
        """Write down who is here, or raise who else is in this place."""
        key, record = self.places[self._rank], msgspec.json.encode(self._mine)
        if self._store.claim(key, record):
            return
        if (found := self._store.look(key)) is not None and _read(found).rank != self._mine.rank:
            self._store.set(f"displaced/{self._mine.rank}", record)
            self._compare([_read(found)])
        self._store.set(key, record)  # over what this rank has left there before

    def hosts(self, timeout: float) -> list[str]:
        """Return the host of every member once all have come, or raise whose list differs."""
        store, rank, size = self._store, self._rank, self._size
        found = await_all(
            store, self.places, rank, size, timeout, came=REACHED, meanwhile=self._look
        )
        members = [_read(record) for record in found]
        self._compare(members)
        return [member.host for member in members]

    def leave_word(self) -> None:
        """Write down that the group was made, for who asks for another one of its name later."""
        self._store.set(MADE, msgspec.json.encode(self._mine))

    def _look(self) -> None:
        """Raise if one of those that have come has another list, and so will not come here."""
        if self._mine.ranks:
            found = map(self._store.look, (*self.places, *self._displaced, MADE))
            self._compare(_read(record) for record in found if record is not None)

    def _compare(self, members: Iterable[_Member]) -> None:
        lists = {member.rank: member.ranks for member in (self._mine, *members)}
        if all(ranks == self._mine.ranks for ranks in lists.values()):
            return
        told = "\n".join(f"  {ranks_text([rank])}: {shown(lists[rank])}" for rank in sorted(lists))
        raise CollectiveMismatch(
            f"new_group and split_group need the same ranks on every rank:\n{told}\n"
            f"Call them with one list after the other on all ranks, also on those that are not in "
            f"it. Or pass use_local_synchronization=True to new_group: each list is a group of its "
            f"own then."
        )
