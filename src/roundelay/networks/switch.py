"""Switch: every rank has one port, both ways, to one crossbar; the textbook's network."""

from __future__ import annotations

from roundelay.networks._base import (
    BANDWIDTH,
    LATENCY,
    REDUCE_BANDWIDTH,
    Graph,
    above_zero,
    both_ways,
)
from roundelay.networks._grids import check_size

__all__ = ["switch"]


def switch(
    size: int,
    *,
    latency: float = LATENCY,
    bandwidth: float = BANDWIDTH,
    reduce_bandwidth: float = REDUCE_BANDWIDTH,
) -> Graph:
    """Link every rank with one switch that is never the bottleneck itself.

    A message alone takes `latency` + bytes / `bandwidth`, whoever sends to whom; several from or
    to the same rank share its port.

    >>> [str(link) for link in switch(4).route(0, 3)]
    ['0→switch', 'switch→3']
    """
    size = check_size("switch", size)
    half = above_zero("switch", "latency", latency, or_zero=True) / 2
    links = (link for rank in range(size) for link in both_ways(rank, "switch", half, bandwidth))
    return Graph("switch", size, links, reduce_bandwidth=reduce_bandwidth)
