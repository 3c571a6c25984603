"""Who ever sends to whom in a schedule: what shape that has, and so how to place the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from roundelay.schedule import Schedule, Transfer

#: A schedule over more different trees than this is no picture of trees.
MOST_TREES = 2

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree over all ranks, and the chunks that travel along it."""

    root: int
    parents: tuple[int | None, ...]  # by rank
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """How ranks are best placed: by host, as trees, along a line, or around a ring."""

    hosts: Groups = ()
    names: tuple[str, ...] = ()  # of the hosts
    trees: tuple[Tree, ...] = ()
    line: bool = False

    @property
    def host(self) -> str:
        """What to call a host: `leaf` where they are called leaf0, leaf1 and so on."""
        kinds = {name.rstrip("0123456789") for name in self.names}
        return kinds.pop() or "group" if len(kinds) == 1 else "group"


def shape_of(schedule: Schedule, hosts: Mapping[str, Sequence[int]] | None = None) -> Shape:
    """Return the shape of a schedule; hosts that the network names win over what it looks like.

    >>> from roundelay.algorithms import algorithms
    >>> shape_of(algorithms.load("broadcast_binomial").schedule(4)).trees[0].parents
    (None, 0, 0, 2)
    >>> shape_of(algorithms.load("all_reduce_hierarchical").schedule(4)).hosts
    ((0, 1), (2, 3))
    """
    named = {
        name: tuple(rank for rank in ranks if rank < schedule.size)
        for name, ranks in (hosts or {}).items()
        if min(ranks, default=schedule.size) < schedule.size
    }
    if len(named) > 1:
        return Shape(hosts=tuple(named.values()), names=tuple(named))
    if schedule.size <= 2:  # noqa: PLR2004 - of two, all shapes look alike
        return Shape()
    upward = all(transfer.src < transfer.dst for transfer in schedule.transfers)
    if upward and not schedule.collective.rooted:
        return Shape(line=True)
    trees = _trees(schedule)
    if trees:
        return Shape(line=True) if _is_path(trees) else Shape(trees=trees)
    hosts_seen = inferred_hosts(schedule)
    return Shape(hosts=hosts_seen, names=tuple(f"host{index}" for index in range(len(hosts_seen))))


def components(transfers: Iterable[Transfer], size: int) -> list[list[int]]:
    """Return the sets of ranks, two or more, that these transfers join, directly or not.

    >>> components([Transfer(0, 0, 1, 0), Transfer(0, 3, 1, 0)], 5)
    [[0, 1, 3]]
    """
    leader = list(range(size))

    def find(rank: int) -> int:
        while leader[rank] != rank:
            leader[rank] = leader[leader[rank]]
            rank = leader[rank]
        return rank

    for transfer in transfers:
        lower, higher = sorted((find(transfer.src), find(transfer.dst)))
        leader[higher] = lower
    joined: dict[int, list[int]] = {}
    for rank in range(size):
        joined.setdefault(find(rank), []).append(rank)
    return [ranks for ranks in joined.values() if len(ranks) > 1]


def inferred_hosts(schedule: Schedule) -> Groups:
    """Return equal runs of ranks that first talk inside, then between, and inside again, or ()."""
    if not schedule.steps:
        return ()
    groups = components(schedule.steps[0], schedule.size)
    inside = len(groups[0])
    runs = [list(range(low, low + inside)) for low in range(0, schedule.size, inside)]
    if groups != runs or inside == schedule.size:
        return ()
    scopes = [scope(step, runs) for step in schedule.steps]
    turns = [now for now, before in zip(scopes, [None, *scopes], strict=False) if now != before]
    return tuple(map(tuple, runs)) if turns == ["inside", "between", "inside"] else ()


def scope(transfers: Iterable[Transfer], groups: Sequence[Sequence[int]]) -> str:
    """Say whether all transfers stay inside their group, all leave it, or neither."""
    home = {rank: index for index, ranks in enumerate(groups) for rank in ranks}
    stays = {home.get(transfer.src) == home.get(transfer.dst) for transfer in transfers}
    return "" if len(stays) != 1 else "inside" if stays.pop() else "between"


def _trees(schedule: Schedule) -> tuple[Tree, ...]:
    """Return the one tree that all transfers run along, or the two that chunks are split over."""
    edges: dict[int, set[tuple[int, int]]] = {}
    below: dict[int, tuple[set[int], set[int]]] = {}  # by chunk: who hands sums on, who gets copies
    for _, src, dst, chunk, op in schedule.transfers:
        edges.setdefault(chunk, set()).add((min(src, dst), max(src, dst)))
        summing, taking = below.setdefault(chunk, (set(), set()))
        summing.update([src] if op == "reduce" else [])
        taking.add(dst)
    every = set().union(*edges.values()) if edges else set()
    kinds: dict[frozenset[tuple[int, int]], list[int]] = {}
    if len(every) == schedule.size - 1:
        kinds[frozenset(every)] = sorted(edges)
    elif not schedule.collective.rooted:
        for chunk, mine in sorted(edges.items()):
            kinds.setdefault(frozenset(mine), []).append(chunk)
    if len(kinds) > MOST_TREES:
        return ()
    found = [
        _tree(schedule, links, chunks, {_root(schedule, *below[chunk]) for chunk in chunks})
        for links, chunks in kinds.items()
    ]
    return tuple(tree for tree in found if tree is not None) if all(found) else ()


def _tree(
    schedule: Schedule, links: frozenset[tuple[int, int]], chunks: list[int], roots: set[int]
) -> Tree | None:
    """Hang the links from their root, or return None where they are no tree over all ranks."""
    near: dict[int, list[int]] = {}
    for rank, neighbour in sorted(links):
        near.setdefault(rank, []).append(neighbour)
        near.setdefault(neighbour, []).append(rank)
    if len(links) != schedule.size - 1 or len(near) != schedule.size or len(roots) > 1:
        return None
    (root,) = roots
    parents: list[int | None] = [None] * schedule.size
    reached, stack = {root}, [root]
    while stack:
        parent = stack.pop()
        for child in near[parent]:
            if child not in reached:
                reached.add(child)
                parents[child] = parent
                stack.append(child)
    return Tree(root, tuple(parents), tuple(chunks)) if len(reached) == schedule.size else None


def _root(schedule: Schedule, summing: set[int], taking: set[int]) -> int:
    """Return the root that is given, or the rank to which a chunk goes up and comes down from.

    Everyone but the root hands its sum on; where nothing is summed, the root has it from the start.
    """
    if schedule.collective.rooted:
        return schedule.root
    return min(set(range(schedule.size)) - (summing or taking), default=0)


def _is_path(trees: Sequence[Tree]) -> bool:
    """Tell a chain of ranks in order, where a tree says less than a line."""
    (tree, *others) = trees
    links = {(rank, up) for rank, up in enumerate(tree.parents) if up is not None}
    return not others and all(abs(rank - up) == 1 for rank, up in links)
