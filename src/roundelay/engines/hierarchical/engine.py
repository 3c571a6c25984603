"""One rank's end of a group on several hosts: shared memory inside, another library between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from roundelay.engines._base import Engine
from roundelay.engines._call import Arena, CollectiveCall, MessageCall, MessageRequest, Request
from roundelay.engines._call_signature import CallSignature, end_signature, signature_of
from roundelay.engines._selector import Select
from roundelay.engines.hierarchical._calls import HierarchicalCalls
from roundelay.engines.hierarchical.join import Meeting, by_mpi, by_store, meet_inside
from roundelay.errors import CollectiveMismatch, CollectiveTimeout, CommunicationError
from roundelay.processes.call_queue import CallQueue
from roundelay.reductions import Array
from roundelay.rendezvous.place import JobPlace
from roundelay.rendezvous.store import OpenStore, no_store
from roundelay.rendezvous.topology import HostTopology

__all__ = ["Hierarchical"]

EXPLAIN_S = 3.0  # for a rank to find out, after its timeout, what was wrong between hosts


class Hierarchical(Engine):
    """A rank of one of several hosts, which need not have equally many.

    `inside` joins the ranks of this host, `everyone` all ranks; without it there is one host only,
    and all is done inside. Messages go by `everyone`, also between ranks of one host: a receiver
    that takes them from any rank has one place to look.
    """

    rounds = True

    def __init__(self, places: HostTopology, inside: Engine, everyone: Engine | None) -> None:
        self.rank, self.size = places.rank, places.size
        self._places, self._inside, self._everyone = places, inside, everyone
        self._queue, self._open = CallQueue(), True
        self._told: CommunicationError | None = None
        self._lane: Engine | None = None
        self._calls: HierarchicalCalls | None = None
        if everyone is None:
            self.fast_path = inside.fast_path
        else:
            self._lane = everyone.group(places.lane)
            self._calls = HierarchicalCalls(places, inside, self._lane, everyone)
        self.timeout = (everyone or inside).timeout
        self.abort = (everyone or inside).abort

    @classmethod
    def join(
        cls, place: JobPlace, store: OpenStore = no_store, *, select: Select, timeout: float
    ) -> Engine:
        """Return the engine of this rank, with MPI between hosts if it started the ranks.

        Where all ranks are on one host, that is shared memory and nothing else.
        """
        if place.by == "mpi":
            return cls.joined(by_mpi(select, timeout), select=select, timeout=timeout)
        by = by_store(store(), place.rank, place.job.size, select, timeout)
        return cls.joined(by, select=select, timeout=timeout)

    @classmethod
    def joined(cls, by: Meeting, *, select: Select, timeout: float) -> Engine:
        """Return the engine of this rank among those of a meeting."""
        places, inside = meet_inside(by, select, timeout)
        return inside if len(places.hosts) == 1 else cls(places, inside, by.everyone())

    def _limit_waiting(self, limit: float) -> None:
        for engine in self._engines():
            engine.timeout = limit
        if self._everyone is not None:
            # Who waits inside for a rank that waits for another host hears from it why.
            self._inside.timeout = limit + EXPLAIN_S

    def run(self, call: CollectiveCall, algorithm: str | None) -> None:
        """Run a call by its parts, one after the other."""
        if self._calls is None:
            self._inside.run(call, algorithm)
        else:
            self._queue.run(self._work(self._calls, call, algorithm), call.collective)

    def begin(self, call: CollectiveCall, algorithm: str | None) -> Request:
        """Run a call on a thread, after those that were started before."""
        if self._calls is None:
            return self._inside.begin(call, algorithm)
        return self._queue.start(self._work(self._calls, call, algorithm))

    def _work(
        self,
        calls: HierarchicalCalls,
        call: CollectiveCall,
        algorithm: str | None,
        signature: CallSignature | None = None,
    ) -> Callable[[], None]:
        everyone = self._everyone or self._inside
        # Inside a host, too, parts are told as the call that they are for.
        described = replace(
            call,
            signature=signature or signature_of(call, algorithm, self._places.here),
            part_of=call.part_of or call.collective,
        )

        def work() -> None:
            if self._told is not None:
                raise type(self._told)(str(self._told))
            with everyone.waiting():
                try:
                    calls.run(described, algorithm)
                except CommunicationError as error:
                    raise self._broken(error) from error

        return work

    def _broken(self, error: CommunicationError) -> CommunicationError:
        """Let the whole group know: ranks of this host, and those that wait for them elsewhere."""
        if self._told is None:
            self._told = self._in_all_numbers(error)
            for engine in self._engines():
                told = error if engine is self._inside else self._told
                engine.fail("failed", f"{type(told).__name__}: {told}")
        return type(self._told)(str(self._told))

    def _in_all_numbers(self, error: CommunicationError) -> CommunicationError:
        """Return an error of a part as one of the whole group, with what its numbers mean."""
        for kind in (CollectiveMismatch, CollectiveTimeout):
            _, found, text = str(error).partition(f"{kind.__name__}: ")
            if found:  # by another rank, which told it
                return kind(text)
        between = self._calls is not None and self._calls.between_hosts
        known = isinstance(error, CollectiveMismatch) or getattr(
            self._lane, "names_ranks_of_all", False
        )
        if between and known:
            return error  # which speaks of the ranks as the user knows them
        ranks = self._places.lane if between else self._places.here
        if tuple(ranks) == tuple(range(len(ranks))):
            return error
        named = ", ".join(f"{number} is rank {rank}" for number, rank in enumerate(ranks))
        note = (
            f"Between hosts, ranks are numbered by host: here {named} of all."
            if between
            else f"Ranks of one host are numbered by their place there: here {named} of all."
        )
        return type(error)(f"{error}\n({note})")

    def post(self, message: MessageCall) -> MessageRequest:
        """Hand the message to the library that joins all ranks."""
        return (self._everyone or self._inside).post(message)

    def group(self, ranks: Sequence[int]) -> Self | None:
        """Make the same groups inside the hosts and between them."""
        hosts = [tuple(rank for rank in ranks if rank in there) for there in self._places.hosts]
        used = tuple(there for there in hosts if there)
        here = hosts[self._places.host]
        inside = self._inside.group([self._places.here.index(rank) for rank in here])
        everyone = None
        if self._everyone is not None:
            everyone = self._everyone.group(list(ranks) if len(used) > 1 else [])
        if self.rank not in ranks or inside is None:
            return None
        number = {rank: place for place, rank in enumerate(ranks)}
        places = tuple(tuple(number[rank] for rank in there) for there in used)
        return type(self)(HostTopology(places, number[self.rank]), inside, everyone)

    def memory(self, nbytes: int) -> Array:
        """Return bytes in the arena of this host."""
        return self._inside.memory(nbytes)

    def own_memory(self, nbytes: int) -> Array:
        """Return bytes in the arena of this host, for this rank alone."""
        return self._inside.own_memory(nbytes)

    def arena(self, *, closed: bool = False) -> Arena | None:
        """Return that of this host."""
        return self._inside.arena(closed=closed)

    def fail(self, word: str, text: str) -> None:
        """Tell the ranks of this host and those of the others."""
        for engine in self._engines():
            engine.fail(word, text)

    def end_calls(self, how: str, *, together: bool, why: str = "") -> None:
        """Compare the end as a last call: with all hosts, and then inside this one."""
        if not self._open:
            return
        if together and self._calls is not None and self._told is None:
            nothing = np.empty(0, np.uint8)
            met = CollectiveCall(
                "barrier", "uint8", 1, 0, 0, lambda: None, nothing, nothing, op="max",
                part_of="close",
            )  # fmt: skip
            signature = end_signature(self._places.here)
            try:
                self._queue.run(self._work(self._calls, met, None, signature))
            except CollectiveTimeout:  # who takes longer to end does no harm
                return
            except CommunicationError:
                if not why:  # else the reason is on its way already
                    raise
        for engine in filter(None, (self._lane, self._everyone)):
            engine.end_calls(how, together=False, why=why)
        self._inside.end_calls(how, together=together, why=why)

    def close(self) -> None:
        """Say goodbye, here and elsewhere, once all that was begun is over."""
        if not self._open:
            return
        self._open = False
        self._queue.run(lambda: None)
        for engine in self._engines():
            engine.close()

    def _engines(self) -> list[Engine]:
        return [
            engine for engine in (self._inside, self._lane, self._everyone) if engine is not None
        ]
