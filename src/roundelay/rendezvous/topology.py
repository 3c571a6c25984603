"""Who is where: the ranks of every host, and the lanes that join hosts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HostTopology"]


@dataclass(frozen=True, slots=True)
class HostTopology:
    """Which ranks each host has, and which rank this is.

    >>> places = HostTopology(((0, 1), (2, 3, 4)), rank=3)
    >>> places.host, places.local, places.lanes, places.lane
    (1, 1, 2, [1, 3])
    """

    hosts: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.hosts))

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return next(host for host, ranks in enumerate(self.hosts) if rank in ranks)

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        return self.host_of(self.rank)

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.hosts[self.host]

    @property
    def local(self) -> int:
        """The place of this rank on its host."""
        return self.here.index(self.rank)

    @property
    def lanes(self) -> int:
        """The number of places that every host has."""
        return min(map(len, self.hosts))

    @property
    def lane(self) -> list[int]:
        """The ranks with the same place, one on each host; none if some host has no such place."""
        return [ranks[self.local] for ranks in self.hosts] if self.local < self.lanes else []
