"""`rd.Mesh`: ranks in a grid, whose axes are communicators."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from itertools import product

from roundelay.arguments import index_of, shown
from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, UnknownNameError

__all__ = ["Mesh"]


class Mesh:
    """Ranks in a grid: `rd.Mesh(dp=2, tp=4, comm=comm)` has 2 rows of 4 ranks.

    Axes may have any names and order; neighbours along the last one have neighbouring ranks.
    `mesh["tp"]` is the communicator of the ranks that differ from this one in `tp` alone,
    `mesh["dp", "cp"]` that of those that differ in these two. All ranks make the mesh, and ask for
    a combination first in the same order.
    """

    def __init__(self, *, comm: Communicator, **axes: int) -> None:
        if not isinstance(comm, Communicator):
            raise InvalidArgumentError(
                f"Mesh needs comm=, the communicator of rd.init() or rd.run, not {shown(comm)}."
            )
        self.comm = comm
        problem = _problem(axes, comm.size)
        every = comm.all_gather_object([problem, *(f"{name}={n!r}" for name, n in axes.items())])
        if problem:
            raise InvalidArgumentError(problem)
        _compare(comm.rank, every)
        self.axes = {name: index_of(length) or 0 for name, length in axes.items()}
        #: Where this rank stands on each axis.
        self.place = dict(zip(self.axes, self._places()[comm.rank], strict=True))
        self._groups: dict[tuple[str, ...], Communicator] = {}
        for name in self.axes:
            self._group((name,))

    def _places(self) -> list[tuple[int, ...]]:
        """Return where every rank stands."""
        return list(product(*map(range, self.axes.values())))

    def size(self, *names: str) -> int:
        """Return how many ranks these axes have together; an axis that is not there has one."""
        return math.prod(self.axes.get(name, 1) for name in names)

    def __contains__(self, name: object) -> bool:
        return name in self.axes

    def __getitem__(self, names: str | tuple[str, ...]) -> Communicator:
        asked = (names,) if isinstance(names, str) else tuple(names)
        for name in asked:
            if name not in self.axes:
                raise UnknownNameError("axes of the mesh", str(name), self.axes)
        return self._group(tuple(name for name in self.axes if name in asked))

    def _group(self, names: tuple[str, ...]) -> Communicator:
        """Return the ranks that differ from this one on these axes alone, in the mesh's order."""
        if names not in self._groups:
            others = [length for name, length in self.axes.items() if name not in names]
            colors = list(product(*map(range, others)))
            mine = tuple(place for name, place in self.place.items() if name not in names)
            whole = len(names) == len(self.axes)
            group = self.comm if whole else self.comm.split(colors.index(mine))
            if group is None:  # a color was given
                raise InvalidArgumentError(f"No ranks along {names}.")
            if not whole:
                vars(group)["_mesh"] = weakref.ref(self)
            self._groups[names] = group
        return self._groups[names]

    def ranks(self, *names: str) -> list[int]:
        """Return the ranks of `mesh[names]`, as the mesh's communicator counts them."""
        mine = tuple(self.place.values())
        fixed = [at for at, name in enumerate(self.axes) if name not in names]
        return [
            rank
            for rank, place in enumerate(self._places())
            if all(place[at] == mine[at] for at in fixed)
        ]

    @staticmethod
    def of(comm: Communicator) -> Mesh | None:
        """Return the mesh of which a communicator is an axis, or several; None if it is of none."""
        kept = vars(comm).get("_mesh")
        return None if kept is None else kept()

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={length}" for name, length in self.axes.items())
        return f"Mesh({axes})"

    def __str__(self) -> str:
        return draw(self.axes, self.comm.rank)


def draw(axes: dict[str, int], here: int | None = None) -> str:
    """Return a mesh as text: its last axis across, the one before down, others as headings.

    >>> print(draw({"dp": 2, "tp": 2}, here=3))
    dp=2, tp=2: 4 ranks, this is rank 3
          tp 0  tp 1
    dp 0     0     1
    dp 1     2   [3]
    """
    names, lengths = list(axes), list(axes.values())
    count = math.prod(lengths)
    title = ", ".join(f"{name}={length}" for name, length in axes.items())
    said = "" if here is None else f", this is rank {here}"
    lines = [f"{title}: {count} rank{'s' if count > 1 else ''}{said}"]
    if not names:
        return lines[0]
    across, rows = names[-1], names[-2:-1]
    heads = [f"{across} {at}" for at in range(lengths[-1])]
    downs = [f"{rows[0]} {at}" for at in range(lengths[-2])] if rows else [""]
    left = max(map(len, downs))
    width = max(len(f"[{count - 1}]"), *map(len, heads)) + 2
    for block, place in enumerate(product(*map(range, lengths[:-2]))):
        if place:
            lines.append(", ".join(f"{n} {at}" for n, at in zip(names[:-2], place, strict=True)))
        lines.append(" " * left + "".join(head.rjust(width) for head in heads))
        for row, down in enumerate(downs):
            first = (block * len(downs) + row) * lengths[-1]
            ranks = range(first, first + lengths[-1])
            cells = (f"[{rank}]" if rank == here else str(rank) for rank in ranks)
            lines.append(down.ljust(left) + "".join(cell.rjust(width) for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def _problem(axes: dict[str, int], size: int) -> str:
    """Return what is wrong with the axes; nothing if they fit."""
    if not axes:
        return f"Mesh needs axes: rd.Mesh(dp={size}, comm=comm), say."
    for name, given in axes.items():
        length = index_of(given)
        if length is None or length < 1:
            return f"The axis {name} of a mesh is a whole number of ranks above 0, not {given!r}."
    count = math.prod(axes.values())
    if count == size:
        return ""
    told = ", ".join(f"{name}={length}" for name, length in axes.items())
    return (
        f"The mesh {told} has {count} ranks, and the communicator has {size}. "
        f"{_way_out(axes, size)}"
    )


def _way_out(axes: dict[str, int], size: int) -> str:
    """Return how a mesh could fit: by another length of its first axis, or other ranks."""
    first, *others = axes
    rest = math.prod(axes[name] for name in others)
    if size % rest == 0:
        return f"Take {first}={size // rest}, or start {math.prod(axes.values())} ranks."
    return f"Start {math.prod(axes.values())} ranks."


def _compare(rank: int, every: Sequence[Sequence[str]]) -> None:
    """Refuse meshes that differ between ranks."""
    for other, theirs in enumerate(every):
        if theirs[0]:
            raise CollectiveMismatch(f"Mesh was refused on rank {other}: {theirs[0]}")
    for other, theirs in enumerate(every):
        if theirs != every[rank]:
            raise CollectiveMismatch(
                f"All ranks make the same mesh, but rank {rank} has "
                f"Mesh({', '.join(every[rank][1:])}) and rank {other} "
                f"Mesh({', '.join(theirs[1:])})."
            )
