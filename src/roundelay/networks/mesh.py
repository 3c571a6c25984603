"""Mesh: ranks in rows and columns, linked to their neighbours, with open edges."""

from __future__ import annotations

from roundelay.networks._base import BANDWIDTH, LATENCY, REDUCE_BANDWIDTH, Graph
from roundelay.networks._grids import check_size, grid, row_count

__all__ = ["mesh"]


def mesh(
    size: int,
    *,
    rows: int | None = None,
    latency: float = LATENCY,
    bandwidth: float = BANDWIDTH,
    reduce_bandwidth: float = REDUCE_BANDWIDTH,
) -> Graph:
    """Link every rank with the ranks left, right, above and below.

    Without `rows` the mesh is as square as the size allows; a prime size makes a line.

    >>> len(mesh(6).route(0, 5)), len(mesh(6, rows=1).route(0, 5))
    (3, 5)
    """
    size = check_size("mesh", size)
    links = grid(size, row_count("mesh", size, rows), latency, bandwidth)
    return Graph("mesh", size, links, reduce_bandwidth=reduce_bandwidth)
