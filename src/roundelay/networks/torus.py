"""Torus: a mesh whose rows and columns are closed to rings."""

from __future__ import annotations

from roundelay.networks._base import BANDWIDTH, LATENCY, REDUCE_BANDWIDTH, Graph
from roundelay.networks._grids import check_size, grid, row_count

__all__ = ["torus"]


def torus(
    size: int,
    *,
    rows: int | None = None,
    latency: float = LATENCY,
    bandwidth: float = BANDWIDTH,
    reduce_bandwidth: float = REDUCE_BANDWIDTH,
) -> Graph:
    """Link every rank with the ranks left, right, above and below, around the edges.

    Without `rows` the torus is as square as the size allows; a prime size makes a ring.

    >>> len(torus(16).route(0, 15))
    2
    """
    size = check_size("torus", size)
    links = grid(size, row_count("torus", size, rows), latency, bandwidth, wrap=True)
    return Graph("torus", size, links, reduce_bandwidth=reduce_bandwidth)
