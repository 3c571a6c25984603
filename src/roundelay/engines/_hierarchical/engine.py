"""One rank's end of a group on several hosts: shared memory inside, another library between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from roundelay.engines._agreement import Plan, end_plan, plan_of
from roundelay.engines._call_queue import InOrder
from roundelay.engines._end import End, Job, Letter, Task
from roundelay.engines._hierarchical.calls import HierarchicalCalls
from roundelay.errors import CollectiveMismatch, CollectiveTimeout, CommunicationError
from roundelay.reductions import Array
from roundelay.rendezvous.topology import Places

__all__ = ["HierarchicalEnd"]

EXPLAIN_S = 3.0  # for a rank to find out, after its timeout, what was wrong between hosts


class HierarchicalEnd(End):
    """A rank of one of several hosts, which need not have equally many.

    `inside` joins the ranks of this host, `everyone` all ranks; without it there is one host only,
    and all is done inside. Messages go by `everyone`, also between ranks of one host: a receiver
    that takes them from any rank has one place to look.
    """

    def __init__(self, places: Places, inside: End, everyone: End | None) -> None:
        self.rank, self.size = places.rank, places.size
        self._places, self._inside, self._everyone = places, inside, everyone
        self._line = InOrder()
        self._told: CommunicationError | None = None
        self._lane: End | None = None
        self._calls: HierarchicalCalls | None = None
        if everyone is None:
            self.quick = inside.quick
        else:
            self._lane = everyone.group(places.lane)
            self._calls = HierarchicalCalls(places, inside, self._lane, everyone)
        self.timeout = (everyone or inside).timeout

    @property
    def timeout(self) -> float:
        """Seconds without progress after which a call gives up on a rank."""
        return self._timeout

    @timeout.setter
    def timeout(self, limit: float) -> None:
        self._timeout = limit
        for end in self._ends():
            end.timeout = limit
        if self._everyone is not None:
            # Who waits inside for a rank that waits for another host hears from it why.
            self._inside.timeout = limit + EXPLAIN_S

    def run(self, job: Job, algorithm: str | None) -> None:
        """Run a job by its parts, one after the other."""
        if self._calls is None:
            self._inside.run(job, algorithm)
        else:
            self._line.run(self._work(self._calls, job, algorithm), job.collective)

    def start(self, job: Job, algorithm: str | None) -> Task:
        """Run a job on a thread, after those that were started before."""
        if self._calls is None:
            return self._inside.start(job, algorithm)
        return self._line.start(self._work(self._calls, job, algorithm))

    def _work(
        self,
        calls: HierarchicalCalls,
        job: Job,
        algorithm: str | None,
        plan: Plan | None = None,
    ) -> Callable[[], None]:
        everyone = self._everyone or self._inside
        # Inside a host, too, parts are told as the call that they are for.
        planned = replace(
            job,
            plan=plan or plan_of(job, algorithm, self._places.here),
            call=job.call or job.collective,
        )

        def work() -> None:
            if self._told is not None:
                raise type(self._told)(str(self._told))
            with everyone.waiting():
                try:
                    calls.run(planned, algorithm)
                except CommunicationError as error:
                    raise self._broken(error) from error

        return work

    def _broken(self, error: CommunicationError) -> CommunicationError:
        """Let the whole group know: ranks of this host, and those that wait for them elsewhere."""
        if self._told is None:
            self._told = self._in_all_numbers(error)
            for end in self._ends():
                told = error if end is self._inside else self._told
                end.fail("failed", f"{type(told).__name__}: {told}")
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

    def post(
        self,
        data: Array,
        dtype: str,
        other: int | None,
        tag: int | None,
        *,
        sends: bool,
        background: bool = True,
    ) -> Letter:
        """Hand the message to the library that joins all ranks."""
        end = self._inside if self._everyone is None else self._everyone
        return end.post(data, dtype, other, tag, sends=sends, background=background)

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
        return type(self)(Places(places, number[self.rank]), inside, everyone)

    def memory(self, nbytes: int) -> Array:
        """Return bytes in the arena of this host."""
        return self._inside.memory(nbytes)

    def own_memory(self, nbytes: int) -> Array:
        """Return bytes in the arena of this host, for this rank alone."""
        return self._inside.own_memory(nbytes)

    def fail(self, word: str, text: str) -> None:
        """Tell the ranks of this host and those of the others."""
        for end in self._ends():
            end.fail(word, text)

    def end_calls(self, how: str, *, together: bool) -> None:
        """Compare the end as a last call: with all hosts, and then inside this one."""
        if together and self._calls is not None and self._told is None:
            nothing = np.empty(0, np.uint8)
            met = Job(
                "barrier", "uint8", 1, 0, 0, lambda: None, nothing, nothing, op="max", call="close"
            )
            plan = end_plan(self._places.here)
            try:
                self._line.run(self._work(self._calls, met, None, plan))
            except CollectiveTimeout:  # who takes longer to end does no harm
                return
        self._inside.end_calls(how, together=together)

    def close(self) -> None:
        """Say goodbye, here and elsewhere, once all that was begun is over."""
        self._line.run(lambda: None)
        for end in self._ends():
            end.close()

    def _ends(self) -> list[End]:
        return [end for end in (self._inside, self._lane, self._everyone) if end is not None]
