"""Fat tree: ranks share leaf switches, leaf switches share a spine."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.arguments import whole
from roundelay.networks._base import (
    BANDWIDTH,
    LATENCY,
    REDUCE_BANDWIDTH,
    Graph,
    above_zero,
    both_ways,
)
from roundelay.networks._grids import check_size
from roundelay.schedule import Link

__all__ = ["fat_tree"]


def fat_tree(
    size: int,
    *,
    per_leaf: int = 8,
    oversubscription: float = 1.0,
    latency: float = LATENCY / 2,
    bandwidth: float = BANDWIDTH,
    reduce_bandwidth: float = REDUCE_BANDWIDTH,
) -> Graph:
    """Link `per_leaf` ranks to every leaf switch, and the leaves to a spine.

    A leaf's uplink has the bandwidth of all its ports together, divided by `oversubscription`: 1
    never slows anyone down, 4 is cheap. It stands for the cables to all spine switches, evenly
    used. `latency` is that of one link. The last leaf may have fewer ranks.

    >>> [str(link) for link in fat_tree(16).route(0, 9)]
    ['0→leaf0', 'leaf0→spine', 'spine→leaf1', 'leaf1→9']
    """
    size = check_size("fat_tree", size)
    per_leaf = whole("per_leaf of fat_tree", per_leaf, 1)
    ports = per_leaf * above_zero("fat_tree", "bandwidth", bandwidth)
    uplink = ports / above_zero("fat_tree", "oversubscription", oversubscription)

    def links() -> Iterator[Link]:
        for rank in range(size):
            yield from both_ways(rank, f"leaf{rank // per_leaf}", latency, bandwidth)
        for leaf in range(-(-size // per_leaf)):
            yield from both_ways(f"leaf{leaf}", "spine", latency, uplink)

    return Graph("fat_tree", size, links(), reduce_bandwidth=reduce_bandwidth)
