"""The lanes of a step: when each rank computes, sends and waits, and what it holds from then on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from roundelay.algorithms import algorithms
from roundelay.schedule import Price, Schedule, price
from roundelay.tuning import default_for
from roundelay.view.training_step.choices import SLOWNESS, StepSizes

__all__ = ["ABSENT", "NEW", "OWN", "THERE", "CellChange", "LaneSpan", "Movement", "StepLanes"]

#: What a rank has of a shard: nothing, its own gradient, what all share, or that after the step.
ABSENT, OWN, THERE, NEW = "0", "1", "2", "3"
PARTS = ("parameters", "gradients", "optimizer")


class LaneSpan(NamedTuple):
    """What a rank does for a while, in one of its lanes."""

    rank: int
    lane: str  # compute, network or server
    kind: str  # forward, backward, step, wait; or the collective
    units: tuple[int, ...]
    start: float
    end: float
    waits_for: int = -1


class Movement(NamedTuple):
    """Something that travels between ranks."""

    kind: str  # the collective; push, pull
    part: str  # parameters, gradients
    units: tuple[int, ...]
    start: float
    end: float
    pairs: tuple[tuple[int, int, int], ...]  # from, to, bytes
    nbytes: int  # of the whole buffer
    algorithm: str
    number: int = 0  # of the bucket; of an update the version that it makes
    stale: int = 0  # updates that a pushed gradient has missed


class CellChange(NamedTuple):
    """What a rank holds of a layer from a time on: a letter for each shard, or for all of it."""

    at: float
    rank: int
    part: str
    unit: int
    cell: str


class StepLanes:
    """Takes down a step as a strategy plays it."""

    def __init__(self, sizes: StepSizes) -> None:
        self.sizes = sizes
        self.size, self.layers = sizes.choices.ranks, sizes.choices.layers
        self.spans: list[LaneSpan] = []
        self.movements: list[Movement] = []
        self.changes: list[CellChange] = []
        self.versions: list[tuple[float, int, int]] = []  # when, which rank (-1: the server), what
        self.cursor = [0.0] * self.size  # of each rank's own thread
        self._free = 0.0  # when the network is, on which one collective goes at a time
        seconds = sizes.seconds
        self.each = {
            "forward": seconds.forward / self.layers,
            "backward": seconds.backward / self.layers,
            "step": seconds.update,
        }

    @property
    def ranks(self) -> range:
        """All of them."""
        return range(self.size)

    @property
    def units(self) -> range:
        """All layers."""
        return range(self.layers)

    def compute(
        self, rank: int, kind: str, units: Sequence[int], *, after: float = 0.0, last: int = -1
    ) -> float:
        """Let a rank compute when it is free, and not before `after`; return when it is done.

        `last` is the rank that it waits for until then, if any.
        """
        self.wait(rank, after, last)
        start = self.cursor[rank]
        slow = SLOWNESS if rank == self.sizes.choices.straggler else 1
        times = 1 if kind == "step" else len(units)
        self.cursor[rank] = end = start + slow * times * self.each[kind]
        self.spans.append(LaneSpan(rank, "compute", kind, tuple(units), start, end))
        return end

    def wait(self, rank: int, until: float, last: int = -1) -> None:
        """Let a rank wait, for the network or for the rank that comes last."""
        if until > self.cursor[rank]:
            self.spans.append(LaneSpan(rank, "compute", "wait", (), self.cursor[rank], until, last))
            self.cursor[rank] = until

    def waited_for(self) -> list[int]:
        """Return for each rank the one that is last now, or -1 for those that are not before it."""
        slowest = max(self.ranks, key=lambda rank: self.cursor[rank])
        return [slowest if at < self.cursor[slowest] else -1 for at in self.cursor]

    def together(
        self, kind: str, part: str, units: Sequence[int], asked: Sequence[float], number: int = 0
    ) -> float:
        """Run a collective once all ranks have asked for it and the network is free.

        Return when it is over.
        """
        ready = max(asked)
        start = max(ready, self._free)
        if self.size == 1:
            return ready
        width = self.sizes.width
        item = width.gradient if part == "gradients" else width.parameter
        nbytes = self.sizes.row(units) * item
        self._free = end = start + self.sizes.took(kind, nbytes)
        last = max(self.ranks, key=lambda rank: asked[rank])
        for rank in self.ranks:
            begun = max(asked[rank], start - (ready - asked[rank]))
            if ready > asked[rank] and start == ready:
                wait = LaneSpan(rank, "network", "wait", tuple(units), begun, start, last)
                self.spans.append(wait)
            self.spans.append(LaneSpan(rank, "network", kind, tuple(units), start, end))
        schedule, cost = chosen(kind, self.size, nbytes, item)
        pairs = tuple(sorted((src, dst, moved) for (src, dst), moved in _between(schedule, cost)))
        name = schedule.name
        self.movements.append(
            Movement(kind, part, tuple(units), start, end, pairs, nbytes, name, number)
        )
        return end

    def message(
        self, kind: str, src: int, dst: int, nbytes: int, start: float, *, version: int, stale: int
    ) -> float:
        """Carry a message between a worker and the server; on one rank it takes no time."""
        end = start + (self.sizes.took("message", nbytes) if src != dst else 0.0)
        part = (
            "gradients" if kind == "push" or self.sizes.choices.strategy == "ps" else "parameters"
        )
        self.movements.append(Movement(kind, part, tuple(self.units), start, end,
                                       ((src, dst, nbytes if src != dst else 0),), nbytes, "",
                                       version, stale))  # fmt: skip
        return end

    def hold(self, at: float, rank: int, part: str, units: Sequence[int], cell: str) -> None:
        """Note what a rank holds of some layers from now on."""
        self.changes += [CellChange(at, rank, part, unit, cell) for unit in units]

    def shard(self, rank: int, mine: str, others: str = ABSENT) -> str:
        """Write a cell of which this rank's shard differs from the rest."""
        return "".join(mine if one == rank else others for one in self.ranks)

    def whole(self, letter: str) -> str:
        """Write a cell of which all shards are alike."""
        return letter * (self.size if self.sizes.choices.divided else 1)


@cache
def chosen(collective: str, size: int, nbytes: int, item: int) -> tuple[Schedule, Price]:
    """Return the schedule that a communicator chooses by default, and its price."""
    name = default_for(size).choose(collective, nbytes)
    schedule = algorithms.load(name).schedule(size)
    return schedule, price(schedule, nbytes, itemsize=item)


def _between(schedule: Schedule, cost: Price) -> list[tuple[tuple[int, int], int]]:
    """Return the bytes between each two ranks; what a rank sends is divided by its transfers."""
    count: dict[tuple[int, int], int] = {}
    out = [0] * schedule.size
    for transfer in schedule.transfers:
        pair = transfer.src, transfer.dst
        count[pair] = count.get(pair, 0) + 1
        out[transfer.src] += 1
    found, left = [], list(cost.sent)
    for pair in sorted(count):
        src = pair[0]
        part = left[src] * count[pair] // out[src]
        out[src], left[src] = out[src] - count[pair], left[src] - part
        found.append((pair, part))
    return found
