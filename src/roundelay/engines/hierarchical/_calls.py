"""Walks nested schedules for one rank: inside its host by shared memory, between by a library.

What a collective does over hosts is data, `over_hosts`; here is only who carries out a phase, and
where its data lies. Additions are grouped: first the ranks of a host, in their order, then hosts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from roundelay import _core
from roundelay.collectives import Collective, collectives
from roundelay.engines._base import CollectiveCall, Engine
from roundelay.engines.hierarchical._cells import HostCells, same
from roundelay.reductions import Array
from roundelay.rendezvous.topology import HostTopology
from roundelay.schedule import NestedCall, NestedPhase, NestedSchedule, lanes_for, over_hosts, split

__all__ = ["HierarchicalCalls"]

PART = 16 << 20  # bytes of a call that are worth a walk of their own
MOST_PARTS = 2  # more gained nothing where hosts had no core to spare


class HierarchicalCalls:
    """Runs calls inside and between hosts, for one rank."""

    def __init__(
        self, places: HostTopology, inside: Engine, lane: Engine | None, everyone: Engine
    ) -> None:
        self._places, self._inside, self._lane, self._everyone = places, inside, lane, everyone
        self._rank = places.rank
        self._nested: dict[tuple[str, int, int], NestedSchedule] = {}
        self._kept: dict[str, Array] = {}
        self.between_hosts = False  # whether that is where it is, or where it came to grief

    def run(self, call: CollectiveCall, algorithm: str | None) -> None:
        """Walk the phases of a call; with an algorithm, on the library that joins all ranks."""
        if (
            algorithm is not None
            and algorithm.removeprefix(f"{call.collective}_") != "hierarchical"
        ):
            self._at_once(call, algorithm)
        elif call.op == "avg" and call.dtype == "float16":
            self._in_float32(call)
        else:
            self._run(self._schedule(call), call)

    def _schedule(self, call: CollectiveCall) -> NestedSchedule:
        lanes = lanes_for(self._places.hosts, call.nbytes)
        key = call.collective, call.root, lanes
        if key not in self._nested:
            collective = collectives.load(call.collective)
            root = call.root if collective.rooted else 0
            self._nested[key] = over_hosts(collective, self._places.hosts, root, lanes=lanes)
        return self._nested[key]

    def _run(self, nested: NestedSchedule, call: CollectiveCall) -> None:
        if nested.phases[0].axis == "everyone":
            self._at_once(call, None)
            return
        # While one part travels between hosts, the next is on its way inside.
        whole = nested.collective.blocks(nested.size) == 1
        parts = max(1, min(MOST_PARTS, call.nbytes // PART)) if whole else 1
        under_way: deque[Iterator[None]] = deque()
        for number, run in enumerate(split(call.count, parts)):
            part = call if parts == 1 else _part(call, run)
            walk = self._walk(nested, part, str(number % 2), background=parts > 1)
            next(walk, None)
            under_way.append(walk)
            if len(under_way) > 1:
                deque(under_way.popleft(), maxlen=0)
        deque(under_way.popleft(), maxlen=0)

    def _walk(
        self, nested: NestedSchedule, call: CollectiveCall, name: str, *, background: bool
    ) -> Iterator[None]:
        """Go through the phases; in the background, pause while data travels between hosts."""
        dtype = _dtype(call)
        cells = HostCells(nested, self._rank, call, lambda what, count: self._scratch(
            name + what, count, dtype
        ))  # fmt: skip
        last = max((n for n, phase in enumerate(nested.phases) if _reduces(phase)), default=-1)
        for number, phase in enumerate(nested.phases):
            mine = phase.call_of(self._rank)
            done: Callable[[], None] = _nothing
            if mine is not None:
                chunks, part = self._call(cells, mine, call, str(number))
                if phase.axis == "inside":
                    self._inside.run(part, None)
                else:
                    done = self._between(part, background=background)
            if background and phase.axis == "lane":
                yield
            done()
            if mine is not None and part.output is not None:
                cells.came(chunks, part.output)
                if number == last:
                    self._divide(call, part.output)
        cells.deliver()

    def _call(
        self, cells: HostCells, mine: NestedCall, call: CollectiveCall, name: str
    ) -> tuple[Sequence[int], CollectiveCall]:
        """Return the chunks that a phase brings this rank, and the call that does it."""
        place = mine.ranks.index(self._rank)
        brings, gets = mine.before(place), mine.after(place)
        given = cells.packed(brings, f"in{name}") if mine.brings(place) else None
        output = cells.room(gets, f"out{name}") if mine.gets(place) else None
        root = mine.collective.name == "broadcast"  # whose own may be locked: it is not written
        if given is not None and output is not None and (root or same(given, output)):
            output = given
        lengths = [cells.length(block) for block in mine.blocks]
        even = len(set(lengths)) == 1
        most = _most_blocks(mine.collective, len(mine.ranks), mine.root)
        return gets, replace(
            call,
            collective=mine.collective.name,
            count=lengths[0] if even else sum(lengths),
            nbytes=call.item * (lengths[0] * most if even else sum(lengths)),
            input=given,
            output=output,
            op="sum" if call.op == "avg" else call.op,
            root=mine.root,
            counts=() if even else tuple(lengths),
        )

    def _between(self, part: CollectiveCall, *, background: bool) -> Callable[[], None]:
        """Begin a call in this rank's lane, and return what waits for it.

        Where there is nothing to carry the first lane meets all the same: to compare the calls.
        """
        lane = self._lane
        empty = not (sum(part.counts) or part.count)
        if lane is None or (empty and self._places.local):
            return _nothing
        if background:
            request = lane.begin(part, None)
            return lambda: self._across(request.wait)
        return lambda: self._across(lambda: lane.run(part, None))

    def _across(self, work: Callable[[], None]) -> None:
        self.between_hosts = True
        work()
        self.between_hosts = False

    def _at_once(self, call: CollectiveCall, algorithm: str | None) -> None:
        """Run a call on all ranks, once the hosts have compared it where they compare all calls."""
        if self._places.local == 0:
            met = replace(
                call, collective="barrier", input=None, output=None, count=0, nbytes=0, counts=()
            )
            self._between(met, background=False)()
        self._everyone.run(call, algorithm)

    def _divide(self, call: CollectiveCall, share: Array) -> None:
        if call.op == "avg" and share.size:
            memory = share.view(np.uint8)
            _core.fold("avg", call.dtype, [memory], [memory], self._places.size)

    def _in_float32(self, call: CollectiveCall) -> None:
        """Add halves in float32, whose sum can't overflow before it is divided."""
        wide = None if call.input is None else call.input.reshape(-1).astype(np.float32)
        output = None if call.output is None else np.empty(call.output.size, np.float32)
        nbytes = 2 * call.nbytes
        self.run(
            replace(call, dtype="float32", item=4, nbytes=nbytes, input=wide, output=output), None
        )
        if call.output is not None and output is not None:
            with np.errstate(over="ignore"):
                call.output.reshape(-1)[:] = output.astype(np.float16)

    def _scratch(self, name: str, count: int, dtype: np.dtype[np.generic]) -> Array:
        """Return memory that is kept for the next call, so that it is not paged in each time."""
        nbytes = count * dtype.itemsize
        found = self._kept.get(name)
        if found is None or found.size < nbytes:
            found = self._kept[name] = np.empty(nbytes, np.uint8)
        return found[:nbytes].view(dtype)


def _nothing() -> None:
    """Wait for nothing."""


def _reduces(phase: NestedPhase) -> bool:
    return any(call.collective.reduces for call in phase.calls)


def _dtype(call: CollectiveCall) -> np.dtype[np.generic]:
    array = call.output if call.input is None else call.input
    return np.dtype(f"V{call.item}") if array is None else array.dtype


def _part(call: CollectiveCall, run: slice) -> CollectiveCall:
    """Return the call on some of its elements."""
    given = None if call.input is None else call.input.reshape(-1)[run]
    output = None if call.output is None else call.output.reshape(-1)[run]
    count = run.stop - run.start
    return replace(call, count=count, nbytes=count * call.item, input=given, output=output)


@lru_cache(maxsize=64)
def _most_blocks(collective: Collective, size: int, root: int) -> int:
    return collective.per_rank(size, root)
