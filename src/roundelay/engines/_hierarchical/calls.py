"""Collectives over hosts: inside each by shared memory, between them by another library.

Ranks with the same place on their hosts form a *lane*; there are as many lanes as the smallest
host has ranks. An all-reduce is a reduce-scatter inside every host, an all-reduce in every lane of
its share, and an all-gather inside: the schedule `all_reduce_hierarchical`, on two engines. So
between hosts every byte travels once per host, whatever the number of ranks there.

Additions are grouped: first the ranks of a host, in their order, then the hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from roundelay import _core
from roundelay.engines._end import End, Job
from roundelay.reductions import Array
from roundelay.rendezvous.topology import Places
from roundelay.schedule import split

__all__ = ["HierarchicalCalls"]

PART = 16 << 20  # bytes of an all-reduce that are worth a call of their own between hosts
MOST_PARTS = 2  # more gained nothing where hosts had no core to spare
SMALL = 32 * 1024  # bytes up to which one lane carries all: several would only add messages


class HierarchicalCalls:
    """Runs jobs inside and between hosts, for one rank."""

    def __init__(self, places: Places, inside: End, lane: End | None, everyone: End) -> None:
        self._places, self._inside, self._lane, self._everyone = places, inside, lane, everyone
        self._host, self._local = places.host, places.local
        self._kept: dict[str, Array] = {}
        self.between_hosts = False  # whether that is where it is, or where it came to grief
        self._composed: dict[str, Callable[[Job], None]] = {
            "all_reduce": self._all_reduce,
            "reduce": self._reduce,
            "broadcast": self._broadcast,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "barrier": self._barrier,
        }

    def run(self, job: Job, algorithm: str | None) -> None:
        """Run a job by parts, or on the library that joins all ranks where parts gain nothing."""
        own = algorithm is None or str(algorithm).removeprefix("all_reduce_") == "hierarchical"
        call = self._composed.get(job.collective)
        if own and call is not None:
            call(job)
        else:
            self._compare(job)
            self._everyone.run(job, algorithm)

    # ---- reductions

    def _all_reduce(self, job: Job) -> None:
        if job.input is None or job.output is None:
            return
        if job.op == "avg" and job.dtype == "float16":
            self._in_float32(job, self._all_reduce)
            return
        # While one part travels between hosts, the next is reduced and the last gathered inside.
        parts = max(1, min(MOST_PARTS, job.nbytes // PART))
        finish: list[Callable[[], None]] = []
        for run in split(job.count, parts):
            finish.append(self._all_reduce_begun(_part(job, run), background=parts > 1))
            if len(finish) > 1:
                finish.pop(0)()
        finish.pop()()

    def _all_reduce_begun(self, job: Job, *, background: bool) -> Callable[[], None]:
        """Reduce inside, have the share on its way, and return what does the rest."""
        counts = self._shares(job)
        start = sum(counts[: self._local])
        # The share lies where it belongs in the result; in place it takes the place of what this
        # rank alone reads, element by element.
        share = _flat(job.output)[start : start + counts[self._local]]
        self._reduced_share(job, counts, share)
        arrived = self._sent_between(job, "all_reduce", share, share, background=background)

        def finish() -> None:
            arrived()
            self._divide(job, share)
            self._gathered(job, share, counts)

        return finish

    def _reduce(self, job: Job) -> None:
        if job.input is None:
            return
        if job.op == "avg" and job.dtype == "float16":
            self._in_float32(job, self._reduce)
            return
        counts, root = self._shares(job), self._places.host_of(job.root)
        share = self._reduced_share(job, counts)
        here = self._host == root
        self._between(job, "reduce", share, share if here else None, root=root)
        if here:
            self._divide(job, share)
            place = self._places.here.index(job.root)
            self._inside.run(_counted(job, "gather", share, job.output, counts, root=place), None)

    def _shares(self, job: Job) -> list[int]:
        """Return how much of one block each rank of this host carries."""
        return _lane_shares(job.count, self._lanes(job), len(self._places.here))

    def _lanes(self, job: Job) -> int:
        return 1 if job.nbytes <= SMALL else self._places.lanes

    def _reduced_share(self, job: Job, counts: Sequence[int], share: Array | None = None) -> Array:
        given = _flat(job.input)
        if share is None:
            share = self._scratch("share", counts[self._local], given.dtype)
        op = "sum" if job.op == "avg" else job.op
        self._inside.run(_counted(job, "reduce_scatter", given, share, counts, op=op), None)
        return share

    def _between(
        self, job: Job, collective: str, given: Array, output: Array | None, *, root: int = 0
    ) -> None:
        """Run a collective of one block in this rank's lane, if its share is anything at all."""
        self._sent_between(job, collective, given, output, root=root, background=False)()

    def _sent_between(
        self,
        job: Job,
        collective: str,
        given: Array,
        output: Array | None,
        *,
        root: int = 0,
        background: bool,
    ) -> Callable[[], None]:
        """Begin it, and return what waits for it; without `background` it begins only then."""
        if self._lane is None or not given.size:
            return lambda: None
        op = "sum" if job.op == "avg" else job.op
        counted = replace(
            job, collective=collective, count=given.size, nbytes=given.nbytes, input=given,
            output=output, op=op, root=root, counts=(),
        )  # fmt: skip
        if not background:
            return lambda: self._carry(counted)
        task = self._lane.start(counted, None)
        return lambda: self._across(task.wait)

    def _divide(self, job: Job, share: Array) -> None:
        if job.op == "avg" and share.size:
            memory = share.view(np.uint8)
            _core.fold("avg", job.dtype, [memory], [memory], self._places.size)

    def _gathered(self, job: Job, share: Array, counts: Sequence[int]) -> None:
        self._inside.run(_counted(job, "all_gather", share, job.output, counts), None)

    def _in_float32(self, job: Job, run: Callable[[Job], None]) -> None:
        """Add halves in float32, whose sum can't overflow before it is divided."""
        wide = _flat(job.input).astype(np.float32)
        output = None if job.output is None else np.empty(job.output.size, np.float32)
        run(replace(job, dtype="float32", item=4, nbytes=2 * job.nbytes, input=wide, output=output))
        if job.output is not None and output is not None:
            with np.errstate(over="ignore"):
                _flat(job.output)[:] = output.astype(np.float16)

    def _reduce_scatter(self, job: Job) -> None:
        """Bring the blocks into the order of lanes, so that each gets those it is to carry on."""
        if job.output is None:
            return
        if job.op == "avg" and job.dtype == "float16":
            self._in_float32(job, self._reduce_scatter)
            return
        places = self._places
        counts = list(job.counts) or [job.count] * places.size
        given = _flat(job.input)
        starts = np.cumsum([0, *counts])
        carried = [_carried(places, lane) for lane in range(places.lanes)]
        order = [rank for lane in carried for ranks in lane for rank in ranks]
        sorted_input = self._scratch("sorted", given.size, given.dtype)
        _copy_blocks(given, starts, order, sorted_input)
        per_lane = [sum(counts[rank] for ranks in lane for rank in ranks) for lane in carried]
        inside = [*per_lane, *[0] * (len(places.here) - places.lanes)]
        share = self._reduced_share(replace(job, input=sorted_input), inside)
        mine = self._scattered_between(job, share, carried, counts)
        self._divide(job, mine)
        if len(places.here) == places.lanes:
            _flat(job.output)[:] = mine
            return
        self._deal_out(job, mine, carried, counts)

    def _scattered_between(
        self, job: Job, share: Array, carried: list[list[list[int]]], counts: Sequence[int]
    ) -> Array:
        """Return what the lane brings to this host, for the ranks that it carries for."""
        if self._lane is None:
            return share[:0]
        per_host = [sum(counts[rank] for rank in ranks) for ranks in carried[self._local]]
        mine = self._scratch("mine", per_host[self._host], share.dtype)
        if sum(per_host):
            op = "sum" if job.op == "avg" else job.op
            self._carry(_counted(job, "reduce_scatter", share, mine, per_host, op=op))
        return mine

    def _deal_out(
        self, job: Job, mine: Array, carried: list[list[list[int]]], counts: Sequence[int]
    ) -> None:
        """Hand blocks to those ranks of this host that have no lane."""
        held = [lane[self._host] for lane in carried]
        per_lane = [sum(counts[rank] for rank in ranks) for ranks in held]
        lengths = [*per_lane, *[0] * (len(self._places.here) - len(held))]
        every = self._scratch("dealt", sum(lengths), mine.dtype)
        self._inside.run(_counted(job, "all_gather", mine, every, lengths), None)
        order = [rank for ranks in held for rank in ranks]
        start = sum(counts[rank] for rank in order[: order.index(self._places.rank)])
        _flat(job.output)[:] = every[start : start + counts[self._places.rank]]

    # ---- movement

    def _broadcast(self, job: Job) -> None:
        if job.output is None:
            return
        root = self._places.host_of(job.root)
        counts = self._shares(job)
        share = self._scratch("share", counts[self._local], _flat(job.output).dtype)
        here = self._host == root
        place = self._places.here.index(job.root) if here else 0
        if here:
            given = _flat(job.input) if self._places.rank == job.root else None
            self._inside.run(_counted(job, "scatter", given, share, counts, root=place), None)
        self._between_from(job, share, root)
        if here:  # what the root itself has is not written, which may be read-only
            self._inside.run(replace(job, root=place), None)
        else:
            self._gathered(job, share, counts)

    def _between_from(self, job: Job, share: Array, root: int) -> None:
        given = share if self._host == root else None
        if self._lane is not None and share.size:
            counted = replace(
                job, count=share.size, nbytes=share.nbytes, input=given, output=share, root=root
            )
            self._carry(counted)

    def _all_gather(self, job: Job) -> None:
        """Gather inside, exchange in lanes a part of what every host has, and gather inside."""
        places = self._places
        counts = list(job.counts) or [job.count] * places.size
        given, output = _flat(job.input), _flat(job.output)
        lanes = self._lanes(job)
        lengths = [sum(counts[rank] for rank in ranks) for ranks in places.hosts]
        parts = [split(length, lanes) for length in lengths]
        host = self._scratch("host", lengths[self._host], given.dtype)
        own = [counts[rank] for rank in places.here]
        self._inside.run(_counted(job, "all_gather", given, host, own), None)
        widths = [[part[lane].stop - part[lane].start for part in parts] for lane in range(lanes)]
        totals = [*map(sum, widths), *[0] * (len(places.here) - lanes)]
        carried = self._scratch("share", totals[self._local], given.dtype)
        if carried.size and self._lane is not None:
            mine = host[parts[self._host][self._local]]
            between = _counted(job, "all_gather", mine, carried, widths[self._local])
            self._carry(between)
        every = self._scratch("every", sum(totals), given.dtype)
        self._inside.run(_counted(job, "all_gather", carried, every, totals), None)
        self._put_in_order(every, widths, counts, output)

    def _put_in_order(
        self, every: Array, widths: list[list[int]], counts: Sequence[int], output: Array
    ) -> None:
        """Copy what came by lanes to where the ranks' blocks belong."""
        starts = np.cumsum([0, *counts])
        ends = np.cumsum([width for lane in widths for width in lane])
        lane_count, hosts = len(widths), self._places.hosts
        for host, ranks in enumerate(hosts):
            pieces = []
            for lane in range(lane_count):
                end = int(ends[lane * len(hosts) + host])
                pieces.append(every[end - widths[lane][host] : end])
            whole = pieces[0] if lane_count == 1 else np.concatenate(pieces)
            at = 0
            for rank in ranks:
                output[starts[rank] : starts[rank + 1]] = whole[at : at + counts[rank]]
                at += counts[rank]

    def _barrier(self, job: Job) -> None:
        self._inside.run(job, None)
        self._compare(job)
        self._inside.run(job, None)

    def _compare(self, job: Job) -> None:
        """See that all hosts make the same call, there where they see it of other calls too."""
        if self._local == 0:
            self._carry(replace(job, collective="barrier", input=None, output=None))

    def _carry(self, job: Job) -> None:
        """Run a job in this rank's lane."""
        if self._lane is not None:
            lane = self._lane
            self._across(lambda: lane.run(job, None))

    def _across(self, work: Callable[[], None]) -> None:
        self.between_hosts = True
        work()
        self.between_hosts = False

    def _scratch(self, name: str, count: int, dtype: np.dtype[np.generic]) -> Array:
        """Return memory that is kept for the next call, so that it is not paged in each time."""
        nbytes = count * dtype.itemsize
        found = self._kept.get(name)
        if found is None or found.size < nbytes:
            found = self._kept[name] = np.empty(nbytes, np.uint8)
        return found[:nbytes].view(dtype)


def _flat(array: Array | None) -> Array:
    return np.empty(0, np.uint8) if array is None else array.reshape(-1)


def _part(job: Job, run: slice) -> Job:
    """Return the job on some of its elements."""
    given, output = _flat(job.input)[run], _flat(job.output)[run]
    return replace(job, count=given.size, nbytes=given.size * job.item, input=given, output=output)


def _lane_shares(count: int, lanes: int, ranks: int) -> list[int]:
    shares = [run.stop - run.start for run in split(count, lanes)]
    return [*shares, *[0] * (ranks - lanes)]


def _carried(places: Places, lane: int) -> list[list[int]]:
    """Return for every host the ranks there whose blocks this lane carries."""
    return [list(ranks[lane :: places.lanes]) for ranks in places.hosts]


def _copy_blocks(given: Array, starts: Array, order: Sequence[int], into: Array) -> None:
    at = 0
    for rank in order:
        block = given[starts[rank] : starts[rank + 1]]
        into[at : at + len(block)] = block
        at += len(block)


def _counted(
    job: Job,
    collective: str,
    given: Array | None,
    output: Array | None,
    counts: Sequence[int],
    *,
    op: str = "sum",
    root: int = 0,
) -> Job:
    """Return a job on blocks of these lengths."""
    even = len(set(counts)) == 1
    return replace(
        job,
        collective=collective,
        count=counts[0] if even else sum(counts),
        nbytes=job.item * sum(counts),
        input=given,
        output=output,
        op=op,
        root=root,
        counts=() if even else tuple(counts),
    )
