"""Fully connected: every pair of ranks has a link of its own."""

from __future__ import annotations

from itertools import combinations

from roundelay.networks._base import BANDWIDTH, LATENCY, REDUCE_BANDWIDTH, Graph, both_ways
from roundelay.networks._grids import check_size

__all__ = ["fully_connected"]


def fully_connected(
    size: int,
    *,
    latency: float = LATENCY,
    bandwidth: float = BANDWIDTH,
    reduce_bandwidth: float = REDUCE_BANDWIDTH,
) -> Graph:
    """Link every rank with every other: no message ever meets another on a link.

    >>> len(fully_connected(4).links)
    12
    """
    size = check_size("fully_connected", size)
    links = (
        link
        for a, b in combinations(range(size), 2)
        for link in both_ways(a, b, latency, bandwidth)
    )
    return Graph("fully_connected", size, links, reduce_bandwidth=reduce_bandwidth)
