"""Hosts: several ranks (GPUs) per host, fast inside, one slow network card per host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from roundelay.arguments import indices_of, shown
from roundelay.errors import InvalidArgumentError
from roundelay.networks._base import BANDWIDTH, REDUCE_BANDWIDTH, Graph, above_zero, both_ways
from roundelay.networks._grids import check_size, divisor
from roundelay.schedule import Link

__all__ = ["hosts"]


def hosts(
    size: int,
    *,
    per_host: int | Sequence[int] | None = None,
    latency: float = 1e-6,
    bandwidth: float = 300e9,
    nic_latency: float = 5e-6,
    nic_bandwidth: float = BANDWIDTH,
    reduce_bandwidth: float = REDUCE_BANDWIDTH,
) -> Graph:
    """Link the ranks of a host through a fast switch, and hosts by one network card each.

    Ranks are numbered host by host. `per_host` is the number of ranks on each, or a list of them;
    without, hosts have the most ranks up to 8 that divide the size. `latency` and `bandwidth` are
    those between two ranks of one host; all ranks of a host share `nic_bandwidth`, and crossing
    from host to host adds `nic_latency`.

    >>> [str(link) for link in hosts(16).route(0, 9)]
    ['0→host0', 'host0→network', 'network→host1', 'host1→9']
    """
    size = check_size("hosts", size)
    lengths = _lengths(size, per_host)
    home = [host for host, length in enumerate(lengths) for _ in range(length)]
    half = above_zero("hosts", "latency", latency, or_zero=True) / 2
    nic_half = above_zero("hosts", "nic_latency", nic_latency, or_zero=True) / 2

    def links() -> Iterator[Link]:
        for rank in range(size):
            yield from both_ways(rank, f"host{home[rank]}", half, bandwidth)
        for host in range(len(lengths)):
            yield from both_ways(f"host{host}", "network", nic_half, nic_bandwidth)

    return Graph("hosts", size, links(), reduce_bandwidth=reduce_bandwidth)


def _lengths(size: int, per_host: int | Sequence[int] | None) -> list[int]:
    """Return how many ranks each host has."""
    if per_host is None or not isinstance(per_host, Sequence):
        inside = divisor("hosts", size, "per_host", per_host, most=8)
        return [inside] * (size // inside)
    found = indices_of(per_host)
    if not found or min(found) < 1 or sum(found) != size:
        raise InvalidArgumentError(
            f"per_host of hosts is a number, or numbers from 1 whose sum is the size {size}, "
            f"not {shown(per_host)}."
        )
    return found
