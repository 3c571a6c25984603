"""Ring: every rank is linked to the next and the one before, and passes on what is for others."""

from __future__ import annotations

from roundelay.networks._base import BANDWIDTH, LATENCY, REDUCE_BANDWIDTH, Graph
from roundelay.networks._grids import check_size, grid

__all__ = ["ring"]


def ring(
    size: int,
    *,
    latency: float = LATENCY,
    bandwidth: float = BANDWIDTH,
    reduce_bandwidth: float = REDUCE_BANDWIDTH,
) -> Graph:
    """Link every rank with both neighbours, the last with the first.

    >>> [str(link) for link in ring(6).route(0, 4)]
    ['0→5', '5→4']
    """
    size = check_size("ring", size)
    links = grid(size, 1, latency, bandwidth, wrap=True)
    return Graph("ring", size, links, reduce_bandwidth=reduce_bandwidth)
