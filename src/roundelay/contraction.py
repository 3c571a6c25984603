"""Layer 2: a product whose indices are cut between ranks: who holds what, and what must be summed.

One rule says it all. A tensor that has the index of a cut is in pieces, and one that lacks it is
whole on every rank. If it is computed there, each rank has summed over its piece of the index
alone: the ranks hold partial sums, which an all-reduce adds up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from roundelay.errors import InvalidArgumentError, UnknownNameError, rank_count
from roundelay.schedule import split

__all__ = [
    "DIMS",
    "PRODUCTS",
    "TENSORS",
    "Contraction",
    "Cube",
    "DimCut",
    "cut_along",
    "shortest_lengths",
]

#: Dims of Y[b,s,o] = Σ_h X[b,s,h]·W[h,o] that can be cut, and their letters; none copies all.
DIMS = {"batch": "b", "sequence": "s", "rows": "h", "columns": "o", "none": ""}
#: The indices of each tensor; a gradient has those of what it is the gradient of.
TENSORS = {"X": "bsh", "W": "ho", "Y": "bso", "dX": "bsh", "dW": "ho", "dY": "bso"}

#: Lengths where nobody says any: at least these, and a multiple of the ranks.
SHORTEST = {"b": 2, "s": 3, "h": 4, "o": 5}

Slices = tuple[slice, ...]  # of a tensor, a slice for each index


@dataclass(frozen=True, slots=True)
class Contraction:
    """One product: its result is summed over the indices that it lacks."""

    result: str
    left: str
    right: str
    text: str

    @property
    def summed(self) -> str:
        """The indices of the factors that the result lacks.

        >>> [each.summed for each in PRODUCTS]
        ['h', 'o', 'bs']
        """
        indices = dict.fromkeys(TENSORS[self.left] + TENSORS[self.right])
        return "".join(index for index in indices if index not in TENSORS[self.result])


PRODUCTS = (
    Contraction("Y", "X", "W", "Y = X·W"),
    Contraction("dX", "dY", "W", "dX = dY·Wᵀ"),
    Contraction("dW", "X", "dY", "dW = Xᵀ·dY"),
)


@dataclass(frozen=True, slots=True)
class DimCut:
    """One axis of a grid of ranks, and the dim that it cuts."""

    dim: str
    ranks: int

    @property
    def index(self) -> str:
        """The letter of the dim; nothing where all ranks of the axis have the same."""
        return DIMS[self.dim]


@dataclass(frozen=True)
class Cube:
    """The cube of a matrix product, b and s by h by o, cut between a grid of ranks.

    X, W and Y are three of its faces, and so are their gradients. Ranks are counted with the last
    cut running fastest.

    >>> cube = Cube({"b": 4, "s": 3, "h": 4, "o": 6}, (DimCut("batch", 2), DimCut("columns", 3)))
    >>> cube.shape(0, "X"), cube.shape(0, "W"), cube.shape(0, "Y")
    ((2, 3, 4), (4, 2), (2, 3, 2))
    >>> [cube.groups(each) for each in PRODUCTS]
    [[], [[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]]
    """

    lengths: Mapping[str, int]
    cuts: tuple[DimCut, ...]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(cut.ranks for cut in self.cuts)

    def places(self) -> list[tuple[int, ...]]:
        """Return where every rank stands in the grid."""
        return list(product(*(range(cut.ranks) for cut in self.cuts)))

    def pieces(self, index: str) -> list[slice]:
        """Return the pieces that an index is cut into; one where it is not."""
        ranks = next((cut.ranks for cut in self.cuts if cut.index == index), 1)
        return split(self.lengths[index], ranks)

    def held(self, rank: int, tensor: str) -> Slices:
        """Return which piece of a tensor a rank has."""
        at = {cut.index: place for cut, place in zip(self.cuts, self.places()[rank], strict=True)}
        return tuple(self.pieces(index)[at.get(index, 0)] for index in TENSORS[tensor])

    def shape(self, rank: int, tensor: str) -> tuple[int, ...]:
        """Return the shape of a rank's piece of a tensor."""
        return tuple(piece.stop - piece.start for piece in self.held(rank, tensor))

    def whole_shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor on one device."""
        return tuple(self.lengths[index] for index in TENSORS[tensor])

    def owners(self, tensor: str) -> list[tuple[Slices, list[int]]]:
        """Return every piece of a tensor with the ranks that have it, in the order of places."""
        ranks_of: dict[str, tuple[Slices, list[int]]] = {}
        for rank in range(self.size):
            piece = self.held(rank, tensor)
            ranks_of.setdefault(str(piece), (piece, []))[1].append(rank)
        return sorted(ranks_of.values(), key=lambda item: [part.start for part in item[0]])

    def summed(self, contraction: Contraction) -> list[DimCut]:
        """Return the cuts along an index that the product sums over: they make partial sums."""
        return [cut for cut in self.cuts if cut.index and cut.index in contraction.summed]

    def groups(self, contraction: Contraction) -> list[list[int]]:
        """Return the ranks that all-reduce the result together; nobody where nothing is summed."""
        if not self.summed(contraction):
            return []
        kept = [cut for cut in self.cuts if cut not in self.summed(contraction)]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(self.places()):
            at = zip(self.cuts, place, strict=True)
            groups.setdefault(tuple(here for cut, here in at if cut in kept), []).append(rank)
        return list(groups.values())


def shortest_lengths(dims: Sequence[str], ranks: Sequence[int]) -> dict[str, int]:
    """Return lengths of b, s, h and o that are small and divide by the ranks of every cut.

    >>> shortest_lengths(["batch", "columns"], [2, 3])
    {'b': 2, 's': 3, 'h': 4, 'o': 6}
    """
    cut = dict(zip((DIMS.get(dim, "") for dim in dims), ranks, strict=False))
    return {index: -(-least // cut.get(index, 1)) * cut.get(index, 1)
            for index, least in SHORTEST.items()}  # fmt: skip


def cut_along(dims: list[str], ranks: list[int], lengths: Mapping[str, int]) -> Cube:
    """Return the cube with a cut for each dim, between so many ranks; refuse what can't be cut."""
    for dim in dims:
        if dim not in DIMS:
            raise UnknownNameError("the matrix product", dim, DIMS)
        if dims.count(dim) > 1:
            raise InvalidArgumentError(
                f"{dim} is cut twice. Cut it once, between {math.prod(ranks)} ranks."
            )
    if len(ranks) != len(dims):
        raise InvalidArgumentError(
            f"{len(dims)} cuts ({', '.join(dims)}) need a number of ranks each, "
            f"such as {','.join(['2'] * len(dims))}, not {','.join(map(str, ranks))}."
        )
    cube = Cube(dict(lengths), tuple(map(DimCut, dims, ranks)))
    for cut in cube.cuts:
        if cut.ranks < 1 or (cut.index and cut.ranks > cube.lengths[cut.index]):
            most = cube.lengths.get(cut.index, "any number")
            raise InvalidArgumentError(
                f"{cut.dim} has {most} entries, which can't be cut between "
                f"{rank_count(cut.ranks)}. Use fewer ranks, or make {cut.index or 'it'} longer."
            )
    return cube
