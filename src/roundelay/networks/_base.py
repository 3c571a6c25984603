"""What every network is made of: nodes, one-way links, and the cheapest path between ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from roundelay.arguments import index_of, shown, whole
from roundelay.errors import InvalidArgumentError, NetworkError
from roundelay.schedule import Link

# Round, illustrative numbers, roughly those of a data centre.
LATENCY = 2e-6  # seconds
BANDWIDTH = 25e9  # bytes per second: 200 Gbit/s
REDUCE_BANDWIDTH = 200e9  # bytes per second that a rank can fold


class Maker(Protocol):
    """What a file of this folder offers: a function from size and options to a network."""

    def __call__(self, size: int, **options: Any) -> Graph:  # options are the network's own
        """Return the network for `size` ranks."""


def above_zero(name: str, what: str, value: float, *, or_zero: bool = False) -> float:
    """Return `value` if it is a finite number above 0, or 0 where that is allowed."""
    finite = type(value) in (int, float) and math.isfinite(value)
    if finite and (value > 0 or (or_zero and value == 0)):
        return value
    least = "from" if or_zero else "above"
    raise NetworkError(f"{name}: {what}", f"must be a number {least} 0, not {value!r}")


def both_ways(a: int | str, b: int | str, latency: float, bandwidth: float) -> Iterator[Link]:
    """Yield a full-duplex connection: one link each way, which do not slow each other down."""
    yield Link(a, b, latency, bandwidth)
    yield Link(b, a, latency, bandwidth)


class Graph:
    """A network of ranks (by number) and switches (by name), joined by one-way links.

    A message takes the path with the least latency; among those the one with the fewest links,
    among those the one through the nodes that come first (ranks before switches).

    >>> line = Graph("line", 2, both_ways(0, 1, 1e-6, 1e9), reduce_bandwidth=1e10)
    >>> [str(link) for link in line.route(0, 1)]
    ['0→1']
    """

    def __init__(
        self,
        name: str,
        size: int,
        links: Iterable[Link],
        *,
        reduce_bandwidth: float = REDUCE_BANDWIDTH,
    ) -> None:
        size = whole("size of a network", size, 1)
        self.name, self.size, self.links = name, size, tuple(links)
        self.reduce_bandwidth = above_zero(name, "reduce_bandwidth", reduce_bandwidth)
        self._out: dict[int | str, dict[int | str, Link]] = {}
        for link in self.links:
            self._add(link)
        switches = dict.fromkeys(node for node in self._out if isinstance(node, str))
        self._places = {node: place for place, node in enumerate([*range(size), *switches])}
        self._check_reach()
        self._least = {
            node: min((link.latency for link in out.values()), default=0.0)
            for node, out in self._out.items()
        }
        self._last_links: dict[int, dict[int | str, Link]] = {}

    def __repr__(self) -> str:
        return f"<network {self.name} of {self.size} ranks and {len(self.links)} links>"

    def route(self, src: int, dst: int) -> tuple[Link, ...]:
        """Return the links that a message from `src` to `dst` crosses, in order."""
        src, dst = self._rank(src), self._rank(dst)
        if src == dst:
            return ()
        direct = self._out[src].get(dst)
        # No other path can win, so there is no need to search: what dense networks live on.
        if direct is not None and direct.latency <= self._least[src]:
            return (direct,)
        last = self._last_links.get(src)
        if last is None:
            last = self._last_links[src] = self._search(src)
        path: list[Link] = []
        node: int | str = dst
        while node != src:
            path.append(last[node])
            node = last[node].src
        return tuple(reversed(path))

    def hosts(self) -> dict[str, list[int]]:
        """Group the ranks by the one switch that each of them hangs on; none where all share one.

        >>> ends = [(0, "one"), (1, "one"), (2, "other"), ("one", "other")]
        >>> links = [link for pair in ends for link in both_ways(*pair, latency=0, bandwidth=1e9)]
        >>> Graph("two hosts", 3, links).hosts()
        {'one': [0, 1], 'other': [2]}
        """
        found: dict[str, list[int]] = {}
        for rank in range(self.size):
            near = list(self._out[rank])
            if len(near) != 1 or not isinstance(near[0], str):
                return {}
            found.setdefault(near[0], []).append(rank)
        return found if 1 < len(found) < self.size else {}

    def _rank(self, given: int) -> int:
        rank = index_of(given)
        if rank is None or not 0 <= rank < self.size:
            raise InvalidArgumentError(
                f"the network {self.name} has no rank {shown(given)}; ranks go from 0 to "
                f"{self.size - 1}."
            )
        return rank

    def _add(self, link: Link) -> None:
        for end in (link.src, link.dst):
            if not isinstance(end, str) and (type(end) is not int or not 0 <= end < self.size):
                raise NetworkError(
                    f"{self.name}: link {link}",
                    f"{end!r} is neither one of the {self.size} ranks nor the name of a switch",
                )
        what = f"link {link}"
        if link.src == link.dst:
            raise NetworkError(f"{self.name}: {what}", "leads back to where it starts")
        above_zero(self.name, f"{what}: latency", link.latency, or_zero=True)
        above_zero(self.name, f"{what}: bandwidth", link.bandwidth)
        out = self._out.setdefault(link.src, {})
        self._out.setdefault(link.dst, {})
        if link.dst in out:
            raise NetworkError(f"{self.name}: {what}", "is there twice; add up the bandwidths")
        out[link.dst] = link

    def _check_reach(self) -> None:
        """Refuse a network in which some rank can't send to, or hear from, rank 0."""
        into: dict[int | str, list[int | str]] = {}
        for link in self.links:
            into.setdefault(link.dst, []).append(link.src)
        for word, near in (("from", self._out), ("to", into)):
            found: set[int | str] = {0}
            stack: list[int | str] = [0]
            while stack:
                fresh = [node for node in near.get(stack.pop(), ()) if node not in found]
                found.update(fresh)
                stack += fresh
            lost = [rank for rank in range(self.size) if rank not in found]
            if lost:
                shown = ", ".join(map(str, lost[:8])) + (", …" if lost[8:] else "")
                raise NetworkError(
                    self.name,
                    f"no path leads {word} rank 0 {'to' if word == 'from' else 'from'} "
                    f"{'rank' if len(lost) == 1 else 'ranks'} {shown}; add the links",
                )

    def _search(self, src: int) -> dict[int | str, Link]:
        """Return the last link of the cheapest path from `src` to every other node (Dijkstra)."""
        last: dict[int | str, Link] = {}
        best: dict[int | str, tuple[float, int]] = {src: (0.0, 0)}
        queue: list[tuple[float, int, int, int | str]] = [(0.0, 0, self._places[src], src)]
        while queue:
            latency, hops, _, node = heapq.heappop(queue)
            if (latency, hops) != best[node]:
                continue
            for link in self._out[node].values():
                reached = (latency + link.latency, hops + 1)
                if link.dst not in best or reached < best[link.dst]:
                    best[link.dst], last[link.dst] = reached, link
                    heapq.heappush(queue, (*reached, self._places[link.dst], link.dst))
        return last
