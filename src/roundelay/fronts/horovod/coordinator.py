"""Rank 0's part in the negotiation: who has submitted what, and what runs next, everywhere.

It knows names and terms as numbers only. What it decides goes to all whom it concerns in one order,
so that whoever is in several process sets meets the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from roundelay.errors import ranks_text
from roundelay.fronts.horovod.control import RankMessage
from roundelay.fronts.horovod.operation import ALLREDUCE, BARRIER, KINDS

__all__ = ["JOINED", "Coordinator", "Decision", "Outcome", "Said"]

SUBMIT = 0  # of `Said`, and looked at most
JOINED = 0, 0  # the operation of a rank that has joined


class Said(IntEnum):
    """What a rank tells the coordinator."""

    SUBMIT = SUBMIT
    JOIN = 1
    STALLED = 2  # it has waited for this operation as long as it may
    LEAVE = 3  # not by choice, if the process set is not 0: the rank raised something
    WAITS = 4  # it has waited for this operation for a while
    WONDERS = 5  # so long that its user should know for whom


class Outcome(IntEnum):
    """What becomes of an operation."""

    RUN = 0  # with an argument other than 0, members first tell one another their lines
    RUN_WITH_JOINED = 1  # the argument is a rank that has the terms
    MISMATCH = 2  # members tell one another their terms, and fail
    FAIL = 3  # the argument is 1 more than the rank that has left, if that is why
    ALL_JOINED = 4  # the argument is who was last
    END = 5
    KINDS_DIFFER = 6  # members tell one another what they call by one name, and fail
    LATE = 7  # nothing yet: who has not submitted it is told
    MISSED = 8  # told to who has left as it raised something: others need it


RUN = Outcome.RUN  # by far the most


class Decision(NamedTuple):
    """What the ranks in `to` are told."""

    to: tuple[int, ...]
    outcome: Outcome
    process_set: int = 0
    name: int = 0
    argument: int = 0
    text: str = ""


class Coordinator:
    """The table of what has been submitted, and by whom."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self._timeout = timeout
        self.members: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._waiting: dict[tuple[int, int], dict[int, RankMessage]] = {}  # by key and rank
        self._joined: dict[int, None] = {}  # in the order they did
        self._left: set[int] = set()
        self._raised: set[int] = set()  # of these, who did not choose to
        self._paired: set[frozenset[int]] = set()  # different lines that were told of

    def heard(self, entry: RankMessage) -> Iterable[Decision]:
        """Take what a rank has said; return what follows from it."""
        if entry.said != SUBMIT:
            return self._others(entry)
        key = entry.process_set, entry.name
        told = self._waiting.get(key)
        if told is None:
            told = self._waiting[key] = {}
        told[entry.rank] = entry
        members = self.members.get(key[0])
        if members is None:
            return (self._fail(key, "its process set was removed."),)
        if len(told) == len(members):
            del self._waiting[key]
            return (self._complete(key, members, [*told.values()]),)
        return self._incomplete(key, members, told) if self._left or self._joined else ()

    def _others(self, entry: RankMessage) -> Iterator[Decision]:
        rank, said, *numbers = entry[:4]
        key = numbers[0], numbers[1]
        if said == Said.JOIN:
            self._joined[rank] = None
            yield from self._settle(key for key in tuple(self._waiting) if key[0] == 0)
            yield from self._never_joined()
            if len(self._joined) == len(self.members[0]):
                last = [*self._joined][-1]
                self._joined.clear()
                yield Decision(self.members[0], Outcome.ALL_JOINED, argument=last)
        elif said == Said.STALLED:
            yield from self._stalled(key)
        elif said == Said.WAITS:
            yield from self._waits(rank, key)
        elif said == Said.WONDERS and key in self._waiting:
            text = f"{_have(self._missing(key))} not submitted it"
            yield Decision((rank,), Outcome.LATE, *key, text=text)
        elif said == Said.LEAVE:
            self._left.add(rank)
            if numbers[0]:
                self._raised.add(rank)
            yield from self._settle(tuple(self._waiting))
            yield from self._never_joined()
            if len(self._left) == len(self.members[0]):
                yield Decision(self.members[0], Outcome.END)

    def removed(self, process_set: int) -> list[Decision]:
        """Fail what still waits in a process set that is gone."""
        keys = [key for key in self._waiting if key[0] == process_set]
        return [self._fail(key, "its process set was removed.") for key in keys]

    def _settle(self, keys: Iterable[tuple[int, int]]) -> Iterator[Decision]:
        """Look again at what waits, after a rank has joined or left."""
        for key in keys:
            yield from self._incomplete(key, self.members[key[0]], self._waiting[key])

    def _complete(
        self, key: tuple[int, int], members: tuple[int, ...], told: Sequence[RankMessage]
    ) -> Decision:
        terms, line = told[0].terms, told[0].line
        for entry in told:
            if entry.terms != terms:
                return Decision(members, Outcome.MISMATCH, *key)
        for entry in told:
            if entry.line != line:
                return self._on_lines(key, members, frozenset([entry.line for entry in told]))
        return Decision(members, RUN, *key)

    def _on_lines(
        self, key: tuple[int, int], members: tuple[int, ...], lines: frozenset[int]
    ) -> Decision:
        """Have members tell one another that they make one call on different lines, once."""
        known = lines in self._paired
        self._paired.add(lines)
        return Decision(members, RUN, *key, argument=0 if known else 1)

    def _incomplete(
        self, key: tuple[int, int], members: tuple[int, ...], told: dict[int, RankMessage]
    ) -> Iterator[Decision]:
        missing = [rank for rank in members if rank not in told]
        entries = [*told.values()]
        if raised := self._raised.intersection(missing):
            yield Decision((min(raised),), Outcome.MISSED)
        elif gone := self._left.intersection(missing):
            yield self._fail(key, f"{_have(gone)} shut down and will not submit it.", min(gone))
        elif key[0] == 0 and self._joined.keys() >= {*missing}:
            kind = entries[0].kind
            if kind not in (ALLREDUCE, BARRIER):
                text = f"{_have(missing)} joined, and {KINDS[kind]} needs data of every rank."
                yield self._fail(key, text)
            elif any(entry.terms != entries[0].terms for entry in entries):
                yield self._fail(key, "the ranks that have not joined have different terms.")
            else:
                del self._waiting[key]
                yield Decision(members, Outcome.RUN_WITH_JOINED, *key, argument=min(told))

    def _never_joined(self) -> Iterator[Decision]:
        """Tell those that wait in `join` of ranks that have left and will not."""
        if self._joined and (gone := self._left - self._joined.keys()):
            if raised := self._raised - self._joined.keys():
                yield Decision((min(raised),), Outcome.MISSED)
                return
            told = tuple(self._joined)
            self._joined.clear()
            text = f"{_have(gone)} shut down and will not join."
            yield Decision(told, Outcome.FAIL, *JOINED, 1 + min(gone), text)

    def _fail(self, key: tuple[int, int], text: str, gone: int = -1) -> Decision:
        told = self._waiting.pop(key)
        return Decision(tuple(told), Outcome.FAIL, *key, 1 + gone, text)

    def _missing(self, key: tuple[int, int]) -> list[int]:
        told = self._waiting[key]
        return [rank for rank in self.members.get(key[0], ()) if rank not in told]

    def _stalled(self, key: tuple[int, int]) -> Iterator[Decision]:
        if key in self._waiting:  # else it has been decided meanwhile
            told = self._waiting[key]
            missing = self._missing(key)
            [one, *_] = told.values()
            other = [
                f" Rank {rank} has submitted {KINDS[entry.kind]} of that name."
                for _, rank, entry in self._called(key[0], one.called)
                if rank in missing
            ]
            yield self._fail(
                key,
                f"{_have(missing)} not submitted it within {self._timeout:g} s, the timeout."
                f"{''.join(other)} A rank that is busy for longer needs a longer one (`roundelay "
                f"run --timeout`); one that is stopped, or calls something else, never comes.",
            )

    def _called(
        self, process_set: int, called: int
    ) -> Iterator[tuple[tuple[int, int], int, RankMessage]]:
        """Return all that waits by one name that a user gave, of whatever kind: key and rank."""
        for key, told in self._waiting.items():
            for rank, entry in told.items():
                if key[0] == process_set and called and entry.called == called:
                    yield key, rank, entry

    def _waits(self, rank: int, key: tuple[int, int]) -> Iterator[Decision]:
        """Note that a rank does nothing but wait; fail what all wait for as different kinds."""
        told = self._waiting.get(key, {})
        if rank not in told:
            return
        told[rank] = told[rank]._replace(said=Said.WAITS)
        found = [*self._called(key[0], told[rank].called)]
        waiting = [one for _, one, entry in found if entry.said == Said.WAITS]
        everyone = sorted(waiting) == sorted(self.members.get(key[0], ())) and len(found) == len(
            waiting
        )
        if everyone and len({other for other, _, _ in found}) > 1:
            for other in dict.fromkeys(other for other, _, _ in found):
                ranks = tuple(self._waiting.pop(other))
                yield Decision(ranks, Outcome.KINDS_DIFFER, *other)


def _have(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    return f"{ranks_text(found)} {'has' if len(found) == 1 else 'have'}"
