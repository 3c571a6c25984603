"""Walks nested schedules for one rank: inside its host by shared memory, between by a library.

What a collective does over hosts is data, `over_hosts`; here is only who carries out a phase, and
where its data lies. Additions are grouped: first the ranks of a host, in their order, then hosts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from roundelay import _core
from roundelay.collectives import collectives
from roundelay.engines._base import Engine
from roundelay.engines._call import CollectiveCall
from roundelay.engines._narrow import NARROW, narrowed, widen
from roundelay.engines.hierarchical._cells import HostCells, same
from roundelay.reductions import Array
from roundelay.rendezvous.topology import HostTopology
from roundelay.schedule import NestedCall, NestedSchedule, RankPhase, lanes_for, over_hosts, split

PART = 16 << 20  # bytes of a call that are worth a walk of their own
MOST_PARTS = 2  # more gained nothing where hosts had no core to spare


class HierarchicalCalls:
    """Runs calls inside and between hosts, for one rank."""

    def __init__(
        self, places: HostTopology, inside: Engine, lane: Engine | None, everyone: Engine
    ) -> None:
        self._places, self._inside, self._lane, self._everyone = places, inside, lane, everyone
        self._known: dict[tuple[str, int, int], tuple[NestedSchedule, list[RankPhase]]] = {}
        self._kept: dict[str, Array] = {}
        self.between_hosts = False  # whether that is where it is, or where it came to grief

    def run(self, call: CollectiveCall, algorithm: str | None) -> None:
        """Walk the phases of a call; with an algorithm, on the library that joins all ranks."""
        prefix = f"{call.collective}_"
        if algorithm is not None and str(algorithm).removeprefix(prefix) != "hierarchical":
            self._at_once(call, algorithm)
        elif call.op == "avg" and call.dtype == "float16":
            self._in_float32(call)
        else:
            self._run(call)

    def _phases(self, call: CollectiveCall) -> tuple[NestedSchedule, list[RankPhase]]:
        lanes = lanes_for(self._places.hosts, call.nbytes)
        key = call.collective, call.root, lanes
        if key not in self._known:
            collective = collectives.load(call.collective)
            root = call.root if collective.rooted else 0
            nested = over_hosts(collective, self._places.hosts, root, lanes=lanes)
            self._known[key] = nested, nested.of_rank(self._places.rank)
        return self._known[key]

    def _run(self, call: CollectiveCall) -> None:
        nested, phases = self._phases(call)
        if phases[0].axis == "everyone":
            self._at_once(call, None)
            return
        # While one part travels between hosts, the next is on its way inside.
        whole = nested.collective.blocks(nested.size) == 1
        parts = max(1, min(MOST_PARTS, call.nbytes // PART)) if whole else 1
        under_way: deque[Iterator[None]] = deque()
        for number, run in enumerate(split(call.count, parts)):
            part = call if parts == 1 else _part(call, run)
            dtype, slot = _dtype(call), str(number % 2)
            scratch = partial(self._scratch, dtype, slot)
            cells = HostCells(nested, self._places.rank, part, scratch)
            walk = self._walk(cells, phases, part, background=parts > 1)
            next(walk, None)
            under_way.append(walk)
            if len(under_way) > 1:
                deque(under_way.popleft(), maxlen=0)
        deque(under_way.popleft(), maxlen=0)

    def _walk(
        self, cells: HostCells, phases: list[RankPhase], call: CollectiveCall, *, background: bool
    ) -> Iterator[None]:
        """Go through the phases; in the background, pause while data travels between hosts."""
        for number, phase in enumerate(phases):
            part = None
            if phase.call is not None:
                last = number + 1 == len(phases)
                part = _part_of(phase, phase.call, cells, call, number, last=last)
            done: Callable[[], None] = _nothing
            if part is not None and phase.axis == "inside":
                self._inside.run(part, None)
            elif part is not None:
                done = self._between(part, background=background)
            if background and phase.axis == "lane":
                yield
            done()
            if part is not None and part.output is not None and phase.gets is not None:
                cells.came(phase.gets, part.output)
                if phase.completes:
                    self._divide(call, part.output)
        cells.deliver()

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
        sent = narrowed(call, self._inside.own_memory)
        self._everyone.run(sent, algorithm)
        if call.wide and call.output is not None and sent.output is not None:
            widen(sent.output, call.output)

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

    def _scratch(self, dtype: np.dtype[np.generic], slot: str, name: str, count: int) -> Array:
        """Return memory that is kept for the next call, so that it is not paged in each time."""
        nbytes = count * dtype.itemsize
        found = self._kept.get(slot + name)
        if found is None or found.size < nbytes:
            found = self._kept[slot + name] = np.empty(nbytes, np.uint8)
        return found[:nbytes].view(dtype)


def _nothing() -> None:
    """Wait for nothing."""


def _dtype(call: CollectiveCall) -> np.dtype[np.generic]:
    if call.wide:
        return NARROW
    array = call.output if call.input is None else call.input
    return np.dtype(f"V{call.item}") if array is None else array.dtype


def _part(call: CollectiveCall, run: slice) -> CollectiveCall:
    """Return the call on some of its elements."""
    given = None if call.input is None else call.input.reshape(-1)[run]
    output = None if call.output is None else call.output.reshape(-1)[run]
    count = run.stop - run.start
    return replace(call, count=count, nbytes=count * call.item, input=given, output=output)


def _part_of(
    phase: RankPhase, mine: NestedCall, cells: HostCells, call: CollectiveCall, number: int,
    *, last: bool,
) -> CollectiveCall:  # fmt: skip
    """Return the call that carries out a phase, for a rank that makes one."""
    # What a library is to carry has been rounded, and so has what others get as it is.
    rounded = phase.axis != "inside" or mine.collective.name == "broadcast"
    given = output = None
    if phase.brings is not None:
        given = cells.packed(phase.brings, f"in{number}", rounded=rounded)
    if phase.gets is not None:
        aside = rounded or phase.completes or not last
        output = cells.room(phase.gets, f"out{number}", rounded=aside)
    root = mine.collective.name == "broadcast"  # whose own may be locked: it is not written
    if given is not None and output is not None and (root or same(given, output)):
        output = given
    lengths = [cells.length(block) for block in mine.blocks]
    even = len(set(lengths)) == 1
    return replace(
        call,
        collective=mine.collective.name,
        count=lengths[0] if even else sum(lengths),
        nbytes=call.item * (lengths[0] * phase.most if even else sum(lengths)),
        input=given,
        output=output,
        op="sum" if call.op == "avg" else call.op,
        root=mine.root,
        counts=() if even else tuple(lengths),
        wide=call.wide and not rounded,
    )
