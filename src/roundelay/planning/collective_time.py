"""How long collectives take on a cluster, in closed form: 100,000 ranks cost no more than two.

The formulas are those of `price` for schedules of the house: inside a host everyone sends directly
to everyone, between hosts a ring or recursive halving, whichever is quicker. Tests compare them.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.networks import Cluster

__all__ = [
    "RankGroup",
    "across_bandwidth",
    "across_latency",
    "all_gather",
    "all_reduce",
    "group_along",
    "one_message",
    "reduce_scatter",
    "rounds_between",
]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that call together: so many in each of some hosts; others like it share the cards."""

    inside: int = 1
    hosts: int = 1
    sharing: int = 1  # groups that send over a host's network card at once

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.inside * self.hosts


def group_along(cluster: Cluster, size: int, stride: int) -> RankGroup:
    """Return the group of `size` ranks that lie `stride` apart, ranks being numbered by host.

    >>> from roundelay.networks import cluster_called
    >>> h100 = cluster_called("h100-ib")
    >>> group_along(h100, 8, 1), group_along(h100, 8, 8)
    (RankGroup(inside=8, hosts=1, sharing=1), RankGroup(inside=1, hosts=8, sharing=8))
    """
    per_host = cluster.per_host
    if stride * size <= per_host:
        return RankGroup(inside=size)
    inside = max(1, per_host // stride)
    return RankGroup(inside, -(-size // inside), min(stride, per_host))


def all_reduce(cluster: Cluster, group: RankGroup, nbytes: float) -> float:
    """Return the seconds of an all-reduce: scattered inside, reduced between, gathered inside."""
    if group.size == 1:
        return 0.0
    return reduce_scatter(cluster, group, nbytes) + all_gather(cluster, group, nbytes)


def reduce_scatter(cluster: Cluster, group: RankGroup, nbytes: float) -> float:
    """Return the seconds of a reduce-scatter of buffers of `nbytes`."""
    part = nbytes * (group.inside - 1) / group.inside
    seconds = _inside(cluster, group, part) + part / cluster.reduce_bandwidth
    if group.hosts == 1:
        return seconds
    return seconds + _between(cluster, group, nbytes / group.inside, folds=True)


def all_gather(cluster: Cluster, group: RankGroup, nbytes: float) -> float:
    """Return the seconds of an all-gather of results of `nbytes`."""
    seconds = _inside(cluster, group, nbytes * (group.inside - 1) / group.inside)
    if group.hosts == 1:
        return seconds
    return seconds + _between(cluster, group, nbytes / group.inside, folds=False)


def one_message(cluster: Cluster, group: RankGroup, nbytes: float) -> float:
    """Return the seconds of a message to the next rank of a group, while all others send theirs."""
    if group.size == 1:
        return 0.0
    if group.hosts == 1:
        return cluster.latency + nbytes / cluster.bandwidth
    return across_latency(cluster) + nbytes / across_bandwidth(cluster, 1, group.sharing)


def _inside(cluster: Cluster, group: RankGroup, part: float) -> float:
    return 0.0 if group.inside == 1 else cluster.latency + part / cluster.bandwidth


def _between(cluster: Cluster, group: RankGroup, nbytes: float, *, folds: bool) -> float:
    """Return the quicker of a ring over the hosts and of halving, which has fewer steps."""
    steps, sent = rounds_between(cluster, group, nbytes, folds=folds)
    return steps * across_latency(cluster) + sent * _per_byte(cluster, group, folds=folds)


def rounds_between(
    cluster: Cluster, group: RankGroup, nbytes: float, *, folds: bool
) -> tuple[int, float]:
    """Return the steps between hosts and the bytes that a rank sends in them: the quicker way."""
    hosts = group.hosts
    ring = hosts - 1, nbytes * (hosts - 1) / hosts
    power = 1 << hosts.bit_length() - 1
    steps, sent = power.bit_length() - 1, nbytes * (power - 1) / power
    # Where hosts are no power of two, the rest hands all it has to others first, or gets it last.
    halving = (steps, sent) if power == hosts else (steps + 1, sent + nbytes)
    latency, per_byte = across_latency(cluster), _per_byte(cluster, group, folds=folds)
    return min(ring, halving, key=lambda one: one[0] * latency + one[1] * per_byte)


def _per_byte(cluster: Cluster, group: RankGroup, *, folds: bool) -> float:
    per_byte = 1 / across_bandwidth(cluster, group.inside, group.sharing)
    return per_byte + 1 / cluster.reduce_bandwidth if folds else per_byte


def across_bandwidth(cluster: Cluster, inside: int, sharing: int) -> float:
    """Return the bandwidth that a rank has to other hosts while its neighbours send, too."""
    return min(cluster.bandwidth, cluster.nic_bandwidth / (inside * sharing))


def across_latency(cluster: Cluster) -> float:
    """Return the latency of a message to another host."""
    return cluster.latency + cluster.nic_latency
