"""All-reduce over two trees at once: who is a leaf in one is inside the other."""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.algorithms._base import implements
from roundelay.collectives.all_reduce import all_reduce
from roundelay.schedule import Transfer, parallel, pipeline, relabel, sequence

__all__ = ["all_reduce_double_binary_tree"]


@implements(all_reduce, parts=lambda segments, **_: 2 * segments)
def all_reduce_double_binary_tree(size: int, *, segments: int = 1) -> Iterator[Transfer]:
    """Reduce and broadcast one half of the data over each of two complementary binary trees.

    About 4 log2 N steps less overlap, as a tree, but each tree carries half of the data, so every
    link carries about the same; with `segments` the halves stream.
    """
    first = _tree(size)
    # Mirrored for even sizes, turned by one for odd: either way leaves and insides swap roles.
    swapped = [(size - 1 - rank if size % 2 == 0 else (rank + 1) % size) for rank in range(size)]
    trees = parallel(
        _up_and_down(first, chunk=0),
        relabel(_up_and_down(first, chunk=1), ranks=swapped),
    )
    return pipeline(trees, segments)


def _tree(size: int) -> dict[int, int]:
    """Map every rank but 0 to its parent in a binary tree that keeps ranks in order.

    Rank r's lowest set bit is its height: odd ranks are leaves, and 0 stands above the whole.

    >>> _tree(5)
    {1: 2, 2: 4, 3: 2, 4: 0}
    """
    parents = {}
    for rank in range(1, size):
        reach = rank & -rank
        up = (rank ^ reach) | (reach << 1)
        parents[rank] = up if up < size else rank ^ reach
    return parents


def _up_and_down(parents: dict[int, int], *, chunk: int) -> Iterator[Transfer]:
    """Reduce to rank 0 as soon as children have come in; broadcast as soon as parents have it."""
    height: dict[int, int] = {}
    for rank in sorted(parents, key=lambda rank: -_depth(parents, rank)):
        height[parents[rank]] = max(height.get(parents[rank], 0), height.setdefault(rank, 0) + 1)
    up = [
        Transfer(height[rank], src=rank, dst=parents[rank], chunk=chunk, op="reduce")
        for rank in parents
    ]
    down = [
        Transfer(_depth(parents, rank) - 1, src=parents[rank], dst=rank, chunk=chunk)
        for rank in parents
    ]
    return sequence(up, down)


def _depth(parents: dict[int, int], rank: int) -> int:
    depth = 0
    while rank in parents:
        rank = parents[rank]
        depth += 1
    return depth
