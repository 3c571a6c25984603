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
from roundelay.engines._base import CollectiveCall, Engine
from roundelay.reductions import Array
from roundelay.rendezvous.topology import HostTopology
from roundelay.schedule import split

__all__ = ["HierarchicalCalls"]

PART = 16 << 20  # bytes of an all-reduce that are worth a call of their own between hosts
MOST_PARTS = 2  # more gained nothing where hosts had no core to spare
SMALL = 32 * 1024  # bytes up to which one lane carries all: several would only add messages


class HierarchicalCalls:
    """Runs calls inside and between hosts, for one rank."""

    def __init__(
        self, places: HostTopology, inside: Engine, lane: Engine | None, everyone: Engine
    ) -> None:
        self._places, self._inside, self._lane, self._everyone = places, inside, lane, everyone
        self._host, self._local = places.host, places.local
        self._kept: dict[str, Array] = {}
        self.between_hosts = False  # whether that is where it is, or where it came to grief
        self._composed: dict[str, Callable[[CollectiveCall], None]] = {
            "all_reduce": self._all_reduce,
            "reduce": self._reduce,
            "broadcast": self._broadcast,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "barrier": self._barrier,
        }

    def run(self, call: CollectiveCall, algorithm: str | None) -> None:
        """Run a call by parts, or on the library that joins all ranks where parts gain nothing."""
        own = algorithm is None or str(algorithm).removeprefix("all_reduce_") == "hierarchical"
        composed = self._composed.get(call.collective)
        if own and composed is not None:
            composed(call)
        else:
            self._compare(call)
            self._everyone.run(call, algorithm)

    # ---- reductions

    def _all_reduce(self, call: CollectiveCall) -> None:
        if call.input is None or call.output is None:
            return
        if call.op == "avg" and call.dtype == "float16":
            self._in_float32(call, self._all_reduce)
            return
        # While one part travels between hosts, the next is reduced and the last gathered inside.
        parts = max(1, min(MOST_PARTS, call.nbytes // PART))
        finish: list[Callable[[], None]] = []
        for run in split(call.count, parts):
            finish.append(self._all_reduce_begun(_part(call, run), background=parts > 1))
            if len(finish) > 1:
                finish.pop(0)()
        finish.pop()()

    def _all_reduce_begun(self, call: CollectiveCall, *, background: bool) -> Callable[[], None]:
        """Reduce inside, have the share on its way, and return what does the rest."""
        counts = self._shares(call)
        start = sum(counts[: self._local])
        # The share lies where it belongs in the result; in place it takes the place of what this
        # rank alone reads, element by element.
        share = _flat(call.output)[start : start + counts[self._local]]
        self._reduced_share(call, counts, share)
        arrived = self._sent_between(call, "all_reduce", share, share, background=background)

        def finish() -> None:
            arrived()
            self._divide(call, share)
            self._gathered(call, share, counts)

        return finish

    def _reduce(self, call: CollectiveCall) -> None:
        if call.input is None:
            return
        if call.op == "avg" and call.dtype == "float16":
            self._in_float32(call, self._reduce)
            return
        counts, root = self._shares(call), self._places.host_of(call.root)
        share = self._reduced_share(call, counts)
        here = self._host == root
        self._between(call, "reduce", share, share if here else None, root=root)
        if here:
            self._divide(call, share)
            place = self._places.here.index(call.root)
            self._inside.run(_counted(call, "gather", share, call.output, counts, root=place), None)

    def _shares(self, call: CollectiveCall) -> list[int]:
        """Return how much of one block each rank of this host carries."""
        return _lane_shares(call.count, self._lanes(call), len(self._places.here))

    def _lanes(self, call: CollectiveCall) -> int:
        return 1 if call.nbytes <= SMALL else self._places.lanes

    def _reduced_share(
        self, call: CollectiveCall, counts: Sequence[int], share: Array | None = None
    ) -> Array:
        given = _flat(call.input)
        if share is None:
            share = self._scratch("share", counts[self._local], given.dtype)
        op = "sum" if call.op == "avg" else call.op
        self._inside.run(_counted(call, "reduce_scatter", given, share, counts, op=op), None)
        return share

    def _between(
        self,
        call: CollectiveCall,
        collective: str,
        given: Array,
        output: Array | None,
        *,
        root: int = 0,
    ) -> None:
        """Run a collective of one block in this rank's lane, if its share is anything at all."""
        self._sent_between(call, collective, given, output, root=root, background=False)()

    def _sent_between(
        self,
        call: CollectiveCall,
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
        op = "sum" if call.op == "avg" else call.op
        counted = replace(
            call, collective=collective, count=given.size, nbytes=given.nbytes, input=given,
            output=output, op=op, root=root, counts=(),
        )  # fmt: skip
        if not background:
            return lambda: self._carry(counted)
        request = self._lane.begin(counted, None)
        return lambda: self._across(request.wait)

    def _divide(self, call: CollectiveCall, share: Array) -> None:
        if call.op == "avg" and share.size:
            memory = share.view(np.uint8)
            _core.fold("avg", call.dtype, [memory], [memory], self._places.size)

    def _gathered(self, call: CollectiveCall, share: Array, counts: Sequence[int]) -> None:
        self._inside.run(_counted(call, "all_gather", share, call.output, counts), None)

    def _in_float32(self, call: CollectiveCall, run: Callable[[CollectiveCall], None]) -> None:
        """Add halves in float32, whose sum can't overflow before it is divided."""
        wide = _flat(call.input).astype(np.float32)
        output = None if call.output is None else np.empty(call.output.size, np.float32)
        run(
            replace(
                call, dtype="float32", item=4, nbytes=2 * call.nbytes, input=wide, output=output
            )
        )
        if call.output is not None and output is not None:
            with np.errstate(over="ignore"):
                _flat(call.output)[:] = output.astype(np.float16)

    def _reduce_scatter(self, call: CollectiveCall) -> None:
        """Bring the blocks into the order of lanes, so that each gets those it is to carry on."""
        if call.output is None:
            return
        if call.op == "avg" and call.dtype == "float16":
            self._in_float32(call, self._reduce_scatter)
            return
        places = self._places
        counts = list(call.counts) or [call.count] * places.size
        given = _flat(call.input)
        starts = np.cumsum([0, *counts])
        carried = [_carried(places, lane) for lane in range(places.lanes)]
        order = [rank for lane in carried for ranks in lane for rank in ranks]
        sorted_input = self._scratch("sorted", given.size, given.dtype)
        _copy_blocks(given, starts, order, sorted_input)
        per_lane = [sum(counts[rank] for ranks in lane for rank in ranks) for lane in carried]
        inside = [*per_lane, *[0] * (len(places.here) - places.lanes)]
        share = self._reduced_share(replace(call, input=sorted_input), inside)
        mine = self._scattered_between(call, share, carried, counts)
        self._divide(call, mine)
        if len(places.here) == places.lanes:
            _flat(call.output)[:] = mine
            return
        self._deal_out(call, mine, carried, counts)

    def _scattered_between(
        self,
        call: CollectiveCall,
        share: Array,
        carried: list[list[list[int]]],
        counts: Sequence[int],
    ) -> Array:
        """Return what the lane brings to this host, for the ranks that it carries for."""
        if self._lane is None:
            return share[:0]
        per_host = [sum(counts[rank] for rank in ranks) for ranks in carried[self._local]]
        mine = self._scratch("mine", per_host[self._host], share.dtype)
        if sum(per_host):
            op = "sum" if call.op == "avg" else call.op
            self._carry(_counted(call, "reduce_scatter", share, mine, per_host, op=op))
        return mine

    def _deal_out(
        self,
        call: CollectiveCall,
        mine: Array,
        carried: list[list[list[int]]],
        counts: Sequence[int],
    ) -> None:
        """Hand blocks to those ranks of this host that have no lane."""
        held = [lane[self._host] for lane in carried]
        per_lane = [sum(counts[rank] for rank in ranks) for ranks in held]
        lengths = [*per_lane, *[0] * (len(self._places.here) - len(held))]
        every = self._scratch("dealt", sum(lengths), mine.dtype)
        self._inside.run(_counted(call, "all_gather", mine, every, lengths), None)
        order = [rank for ranks in held for rank in ranks]
        start = sum(counts[rank] for rank in order[: order.index(self._places.rank)])
        _flat(call.output)[:] = every[start : start + counts[self._places.rank]]

    # ---- movement

    def _broadcast(self, call: CollectiveCall) -> None:
        if call.output is None:
            return
        root = self._places.host_of(call.root)
        counts = self._shares(call)
        share = self._scratch("share", counts[self._local], _flat(call.output).dtype)
        here = self._host == root
        place = self._places.here.index(call.root) if here else 0
        if here:
            given = _flat(call.input) if self._places.rank == call.root else None
            self._inside.run(_counted(call, "scatter", given, share, counts, root=place), None)
        self._between_from(call, share, root)
        if here:  # what the root itself has is not written, which may be read-only
            self._inside.run(replace(call, root=place), None)
        else:
            self._gathered(call, share, counts)

    def _between_from(self, call: CollectiveCall, share: Array, root: int) -> None:
        given = share if self._host == root else None
        if self._lane is not None and share.size:
            counted = replace(
                call, count=share.size, nbytes=share.nbytes, input=given, output=share, root=root
            )
            self._carry(counted)

    def _all_gather(self, call: CollectiveCall) -> None:
        """Gather inside, exchange in lanes a part of what every host has, and gather inside."""
        places = self._places
        counts = list(call.counts) or [call.count] * places.size
        given, output = _flat(call.input), _flat(call.output)
        lanes = self._lanes(call)
        lengths = [sum(counts[rank] for rank in ranks) for ranks in places.hosts]
        parts = [split(length, lanes) for length in lengths]
        host = self._scratch("host", lengths[self._host], given.dtype)
        own = [counts[rank] for rank in places.here]
        self._inside.run(_counted(call, "all_gather", given, host, own), None)
        widths = [[part[lane].stop - part[lane].start for part in parts] for lane in range(lanes)]
        totals = [*map(sum, widths), *[0] * (len(places.here) - lanes)]
        carried = self._scratch("share", totals[self._local], given.dtype)
        if carried.size and self._lane is not None:
            mine = host[parts[self._host][self._local]]
            between = _counted(call, "all_gather", mine, carried, widths[self._local])
            self._carry(between)
        every = self._scratch("every", sum(totals), given.dtype)
        self._inside.run(_counted(call, "all_gather", carried, every, totals), None)
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
                engine = int(ends[lane * len(hosts) + host])
                pieces.append(every[engine - widths[lane][host] : engine])
            whole = pieces[0] if lane_count == 1 else np.concatenate(pieces)
            at = 0
            for rank in ranks:
                output[starts[rank] : starts[rank + 1]] = whole[at : at + counts[rank]]
                at += counts[rank]

    def _barrier(self, call: CollectiveCall) -> None:
        self._inside.run(call, None)
        self._compare(call)
        self._inside.run(call, None)

    def _compare(self, call: CollectiveCall) -> None:
        """See that all hosts make the same call, there where they see it of other calls too."""
        if self._local == 0:
            self._carry(replace(call, collective="barrier", input=None, output=None))

    def _carry(self, call: CollectiveCall) -> None:
        """Run a call in this rank's lane."""
        if self._lane is not None:
            lane = self._lane
            self._across(lambda: lane.run(call, None))

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


def _part(call: CollectiveCall, run: slice) -> CollectiveCall:
    """Return the call on some of its elements."""
    given, output = _flat(call.input)[run], _flat(call.output)[run]
    return replace(
        call, count=given.size, nbytes=given.size * call.item, input=given, output=output
    )


def _lane_shares(count: int, lanes: int, ranks: int) -> list[int]:
    shares = [run.stop - run.start for run in split(count, lanes)]
    return [*shares, *[0] * (ranks - lanes)]


def _carried(places: HostTopology, lane: int) -> list[list[int]]:
    """Return for every host the ranks there whose blocks this lane carries."""
    return [list(ranks[lane :: places.lanes]) for ranks in places.hosts]


def _copy_blocks(given: Array, starts: Array, order: Sequence[int], into: Array) -> None:
    at = 0
    for rank in order:
        block = given[starts[rank] : starts[rank + 1]]
        into[at : at + len(block)] = block
        at += len(block)


def _counted(
    call: CollectiveCall,
    collective: str,
    given: Array | None,
    output: Array | None,
    counts: Sequence[int],
    *,
    op: str = "sum",
    root: int = 0,
) -> CollectiveCall:
    """Return a call on blocks of these lengths."""
    even = len(set(counts)) == 1
    return replace(
        call,
        collective=collective,
        count=counts[0] if even else sum(counts),
        nbytes=call.item * sum(counts),
        input=given,
        output=output,
        op=op,
        root=root,
        counts=() if even else tuple(counts),
    )
