"""Every collective over hosts: inside each, between them, and inside again.

Ranks with the same place on their hosts form a *lane*. What belongs to a rank is carried by the
lane of its place; on hosts with more ranks than there are lanes, those above share them. Between
hosts every byte travels once per host, whatever the number of ranks there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from roundelay.arguments import shown
from roundelay.collectives import Collective, collectives
from roundelay.errors import InvalidArgumentError
from roundelay.schedule.nested import Axis, NestedCall, NestedPhase, NestedSchedule

__all__ = ["lanes_for", "over_hosts"]

SMALL = 32 * 1024  # bytes up to which one lane carries all: several would only add messages

Hosts = tuple[tuple[int, ...], ...]
Chunks = tuple[int, ...]
#: What the rank at one place has for the rank at another, on one host.
Moves = Mapping[tuple[int, int], Chunks]
Phase = tuple[Axis, Iterable[NestedCall]]


def lanes_for(hosts: Sequence[Sequence[int]], nbytes: int) -> int:
    """Return how many lanes carry a call whose largest buffer has so many bytes.

    >>> lanes_for(((0, 1, 2), (3, 4)), 8), lanes_for(((0, 1, 2), (3, 4)), 1 << 20)
    (1, 2)
    """
    return 1 if nbytes <= SMALL else min(map(len, hosts))


def over_hosts(
    collective: Collective, hosts: Iterable[Iterable[int]], root: int = 0, *, lanes: int
) -> NestedSchedule:
    """Return the phases of a collective over the ranks of these hosts.

    >>> from roundelay.collectives.all_reduce import all_reduce
    >>> plan = over_hosts(all_reduce, [(0, 1), (2, 3)], lanes=2)
    >>> [(phase.axis, phase.calls[0].collective.name) for phase in plan.phases]
    [('inside', 'reduce_scatter'), ('lane', 'all_reduce'), ('inside', 'all_gather')]
    """
    there = _checked(collective, hosts)
    collective.check(sum(map(len, there)), root)
    plan = _HostPlan(there, lanes, root)
    made = PHASES.get(collective.name)
    parts = lanes if collective.name in ("all_reduce", "reduce", "broadcast") else 1
    phases = [
        NestedPhase(axis, tuple(kept))
        for axis, calls in (_at_once(plan, collective) if made is None else made(plan))
        if (kept := [call for call in calls if len(call.ranks) > 1 and any(call.blocks)])
    ]
    return NestedSchedule(collective, plan.hosts, tuple(phases), root, parts)


def _checked(collective: Collective, hosts: Iterable[Iterable[int]]) -> Hosts:
    found = tuple(tuple(ranks) for ranks in hosts)
    every = sorted(rank for ranks in found for rank in ranks)
    if not found or not all(found) or every != list(range(len(every))):
        raise InvalidArgumentError(
            f"{collective.name} over hosts needs every rank from 0 on one host, and a rank on "
            f"every host, not {shown(found)}."
        )
    return found


class _HostPlan:
    """The hosts, their lanes, and the calls that phases are made of."""

    def __init__(self, hosts: Hosts, lanes: int, root: int) -> None:
        self.hosts, self.lanes, self.root = hosts, lanes, root
        self.size = sum(map(len, hosts))
        most = min(map(len, hosts))
        if not 0 < lanes <= most:
            raise InvalidArgumentError(f"These hosts have 1 to {most} lanes, not {shown(lanes)}.")
        self.root_host = next(host for host, ranks in enumerate(hosts) if root in ranks)
        self.root_place = hosts[self.root_host].index(root)
        self.everywhere = range(len(hosts))
        self.elsewhere = [host for host in self.everywhere if host != self.root_host]

    def carried(self, host: int, lane: int) -> Chunks:
        """Return the ranks of a host that a lane carries for."""
        return self.hosts[host][lane :: self.lanes]

    def shares(self) -> list[Chunks]:
        """Return for every lane all ranks that it carries for."""
        every = range(self.lanes)
        return [sum((self.carried(host, lane) for host in self.everywhere), ()) for lane in every]

    def call(
        self, name: str, ranks: Iterable[int], blocks: Iterable[Chunks], root: int = 0
    ) -> NestedCall:
        return NestedCall(collectives.load(name), tuple(ranks), tuple(blocks), root)

    # ---- inside hosts

    def inside(self, name: str, host: int, blocks: Sequence[Chunks], root: int = 0) -> NestedCall:
        """Return a call among the ranks of a host; those above the lanes have no block."""
        ranks = self.hosts[host]
        return self.call(name, ranks, [*blocks, *[()] * (len(ranks) - len(blocks))], root)

    def reduced(self, shares: Sequence[Chunks]) -> Phase:
        """Add up inside every host; each lane gets its share."""
        if self.lanes == 1:
            return "inside", [
                self.call("reduce", self.hosts[host], shares) for host in self.everywhere
            ]
        return "inside", [self.inside("reduce_scatter", host, shares) for host in self.everywhere]

    def shared(self, shares: Sequence[Chunks], hosts: Iterable[int] | None = None) -> Phase:
        """Let everyone on these hosts have what every lane brought."""
        there = self.everywhere if hosts is None else hosts
        if self.lanes == 1:
            return "inside", [self.call("broadcast", self.hosts[host], shares) for host in there]
        return "inside", [self.inside("all_gather", host, shares) for host in there]

    def exchange(self, host: int, moves: Moves) -> list[NestedCall]:
        """Move chunks from place to place: a gather or a scatter where one end is the same."""
        places = range(len(self.hosts[host]))
        sources, targets = ({ends[end] for ends in moves} for end in (0, 1))
        if all(src == dst for src, dst in moves):
            return []
        if len(sources) == 1:
            (root,) = sources
            blocks = [moves.get((root, place), ()) for place in places]
            return [self.inside("scatter", host, blocks, root)]
        if len(targets) == 1:
            (root,) = targets
            blocks = [moves.get((place, root), ()) for place in places]
            return [self.inside("gather", host, blocks, root)]
        square = [moves.get((src, dst), ()) for src in places for dst in places]
        return [self.call("all_to_all", self.hosts[host], square)]

    def collected(self, hosts: Iterable[int]) -> Phase:
        """Bring every rank's block to the rank that carries it."""
        return "inside", [
            call
            for host in hosts
            for call in self.exchange(host, {
                (place, place % self.lanes): (rank,) for place, rank in enumerate(self.hosts[host])
            })
        ]  # fmt: skip

    def delivered(self, hosts: Iterable[int], chunks: Callable[[int, int], Chunks]) -> Phase:
        """Bring what came for ranks above the lanes, `chunks(host, rank)`, to them."""
        return "inside", [
            call
            for host in hosts
            for call in self.exchange(host, {
                (place % self.lanes, place): chunks(host, rank)
                for place, rank in enumerate(self.hosts[host])
                if place >= self.lanes
            })
        ]  # fmt: skip

    # ---- between hosts

    def between(self, name: str, blocks: Callable[[int], Iterable[Chunks]], root: int = 0) -> Phase:
        """Make a call in every lane, on `blocks(lane)`."""
        return "lane", [
            self.call(name, [ranks[lane] for ranks in self.hosts], blocks(lane), root)
            for lane in range(self.lanes)
        ]

    def by_host(self, lane: int) -> list[Chunks]:
        """Return what a lane carries for each host."""
        return [self.carried(host, lane) for host in self.everywhere]

    def by_other_host(self, lane: int) -> list[Chunks]:
        """Return the same, without what the root's host has of its own."""
        return [
            () if host == self.root_host else self.carried(host, lane) for host in self.everywhere
        ]


def _parts(plan: _HostPlan) -> list[Chunks]:
    """Return the part of a single block that each lane carries."""
    return [(lane,) for lane in range(plan.lanes)]


def _all_reduce(plan: _HostPlan) -> list[Phase]:
    return [
        plan.reduced(_parts(plan)),
        plan.between("all_reduce", lambda lane: [(lane,)]),
        plan.shared(_parts(plan)),
    ]


def _reduce(plan: _HostPlan) -> list[Phase]:
    to_root = {(lane, plan.root_place): (lane,) for lane in range(plan.lanes)}
    return [
        plan.reduced(_parts(plan)),
        plan.between("reduce", lambda lane: [(lane,)], plan.root_host),
        ("inside", plan.exchange(plan.root_host, to_root)),
    ]


def _broadcast(plan: _HostPlan) -> list[Phase]:
    """Serve the root's host last: until then its ranks hear of it if others call otherwise."""
    ranks, whole = plan.hosts[plan.root_host], tuple(range(plan.lanes))
    from_root = {(plan.root_place, lane): (lane,) for lane in range(plan.lanes)}
    axis, shared = plan.shared(_parts(plan), plan.elsewhere)
    return [
        ("inside", plan.exchange(plan.root_host, from_root)),
        plan.between("broadcast", lambda lane: [(lane,)], plan.root_host),
        (axis, [plan.call("broadcast", ranks, [whole], plan.root_place), *shared]),
    ]


def _all_gather(plan: _HostPlan) -> list[Phase]:
    return [
        plan.collected(plan.everywhere),
        plan.between("all_gather", plan.by_host),
        plan.shared(plan.shares()),
    ]


def _reduce_scatter(plan: _HostPlan) -> list[Phase]:
    return [
        plan.reduced(plan.shares()),
        plan.between("reduce_scatter", plan.by_host),
        plan.delivered(plan.everywhere, lambda _, rank: (rank,)),
    ]


def _gather(plan: _HostPlan) -> list[Phase]:
    """Let the root's host gather last, with what its lanes brought."""
    brought = [sum(plan.by_other_host(lane), ()) for lane in range(plan.lanes)]
    to_root = {
        (place, plan.root_place): (rank, *(brought[place] if place < plan.lanes else ()))
        for place, rank in enumerate(plan.hosts[plan.root_host])
    }
    return [
        plan.collected(plan.elsewhere),
        plan.between("gather", plan.by_other_host, plan.root_host),
        ("inside", plan.exchange(plan.root_host, to_root)),
    ]


def _scatter(plan: _HostPlan) -> list[Phase]:
    """Send away what others need before the root's own host is served, as in a broadcast."""
    here, root = plan.hosts[plan.root_host], plan.root_place
    away = {(root, lane): sum(plan.by_other_host(lane), ()) for lane in range(plan.lanes)}
    own = {(root, place): (rank,) for place, rank in enumerate(here)}
    axis, delivered = plan.delivered(plan.elsewhere, lambda _, rank: (rank,))
    return [
        ("inside", plan.exchange(plan.root_host, away)),
        plan.between("scatter", plan.by_other_host, plan.root_host),
        (axis, [*plan.exchange(plan.root_host, own), *delivered]),
    ]


def _all_to_all(plan: _HostPlan) -> list[Phase]:
    """Hand every lane what it is to carry; then between hosts, and to those above the lanes."""

    def chunks(sources: Iterable[int], targets: Sequence[int]) -> Chunks:
        return tuple(src * plan.size + dst for src in sources for dst in targets)

    def abroad(host: int, lane: int) -> Chunks:
        """Return the ranks on other hosts that a lane carries for."""
        there = [plan.carried(other, lane) for other in plan.everywhere if other != host]
        return sum(there, ()) if lane < plan.lanes else ()

    def handed(host: int) -> Moves:
        here = list(enumerate(plan.hosts[host]))
        return {
            (place, to): chunks([src], (dst, *abroad(host, to)))
            for place, src in here
            for to, dst in here
        }

    def between(lane: int) -> list[Chunks]:
        return [
            chunks(plan.hosts[src], plan.carried(dst, lane)) if src != dst else ()
            for src in plan.everywhere
            for dst in plan.everywhere
        ]

    def arrived(host: int, rank: int) -> Chunks:
        others = [src for other in plan.everywhere if other != host for src in plan.hosts[other]]
        return chunks(others, [rank])

    return [
        (
            "inside",
            [call for host in plan.everywhere for call in plan.exchange(host, handed(host))],
        ),
        plan.between("all_to_all", between),
        plan.delivered(plan.everywhere, arrived),
    ]


def _barrier(plan: _HostPlan) -> list[Phase]:
    inside = [plan.call("barrier", ranks, [(0,)]) for ranks in plan.hosts]
    between = plan.call("barrier", [ranks[0] for ranks in plan.hosts], [(0,)])
    phases: list[Phase] = [("inside", inside), ("lane", [between]), ("inside", inside)]
    return phases if len(plan.hosts) > 1 else phases[:1]


def _at_once(plan: _HostPlan, collective: Collective) -> list[Phase]:
    """Return one phase of all ranks: of what has no parts, as a scan, which follows the ranks."""
    blocks = [(block,) for block in range(collective.blocks(plan.size))]
    call = NestedCall(collective, tuple(range(plan.size)), tuple(blocks), plan.root)
    return [("everyone", [call])]


#: Collectives that go in phases; others go at once.
PHASES: Mapping[str, Callable[[_HostPlan], list[Phase]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
}
