"""Cuts of a matrix product: pieces make the whole, and what lacks an index of a cut is summed."""

from __future__ import annotations

import math
from itertools import combinations, permutations, product

import pytest

from roundelay.contraction import DIMS, PRODUCTS, TENSORS, Cube, DimCut, cut_along
from roundelay.errors import InvalidArgumentError, UnknownNameError

LENGTHS = {"b": 4, "s": 5, "h": 6, "o": 7}
GRIDS = [
    (dims, ranks)
    for count in (1, 2, 3)
    for dims in combinations(DIMS, count)
    for ranks in product((1, 2, 3), repeat=count)
]


@pytest.mark.parametrize(("dims", "ranks"), GRIDS, ids=str)
def test_pieces_make_the_whole_and_sums_are_complete(
    dims: tuple[str, ...], ranks: tuple[int, ...]
) -> None:
    cube = cut_along(list(dims), list(ranks), LENGTHS)
    assert cube.size == math.prod(ranks)
    for tensor in TENSORS:
        cells: dict[tuple[int, ...], list[int]] = {}
        for piece, owners in cube.owners(tensor):
            for cell in product(*(range(part.start, part.stop) for part in piece)):
                cells.setdefault(cell, []).extend(owners)
        assert set(cells) == set(product(*(range(LENGTHS[i]) for i in TENSORS[tensor])))
        copies = math.prod(
            cut.ranks for cut in cube.cuts if not cut.index or cut.index not in TENSORS[tensor]
        )
        assert {len(owners) for owners in cells.values()} == {copies}
    for each in PRODUCTS:
        # Every term of every sum is computed once in a group, whichever ranks those are.
        groups = cube.groups(each) or [[rank] for rank in range(cube.size)]
        assert sorted(rank for group in groups for rank in group) == list(range(cube.size))
        for group in groups:
            assert len({str(cube.held(rank, each.result)) for rank in group}) == 1
            terms = [
                math.prod(stop - start for start, stop in summed_pieces(cube, each.summed, rank))
                for rank in group
            ]
            assert sum(terms) == math.prod(LENGTHS[index] for index in each.summed)


def summed_pieces(cube: Cube, indices: str, rank: int) -> list[tuple[int, int]]:
    """Return which part of each summed index a rank has, in a tensor that has the index."""
    having = {index: next(name for name in TENSORS if index in TENSORS[name]) for index in indices}
    parts = [cube.held(rank, name)[TENSORS[name].index(index)] for index, name in having.items()]
    return [(part.start, part.stop) for part in parts]


@pytest.mark.parametrize(
    ("dim", "summed"),
    [("batch", "dW"), ("sequence", "dW"), ("rows", "Y"), ("columns", "dX"), ("none", None)],
)
def test_a_cut_forces_one_all_reduce(dim: str, summed: str | None) -> None:
    cube = cut_along([dim], [2], LENGTHS)
    results = [each.result for each in PRODUCTS if cube.groups(each)]
    assert results == ([summed] if summed else [])


@pytest.mark.parametrize("dims", list(permutations(["batch", "columns", "sequence"])), ids=str)
def test_cuts_that_one_product_sums_over_make_one_group(dims: tuple[str, ...]) -> None:
    cube = Cube(LENGTHS, tuple(DimCut(dim, 2) for dim in dims))
    groups = {each.result: cube.groups(each) for each in PRODUCTS}
    assert [len(groups[name]) for name in ("Y", "dX", "dW")] == [0, 4, 2]
    assert {len(group) for group in groups["dW"]} == {4}


@pytest.mark.parametrize(
    ("dims", "ranks", "words"),
    [
        (["batch", "batch"], [2, 2], "cut twice. Cut it once, between 4 ranks"),
        (["batch"], [2, 2], "need a number of ranks each"),
        (["batch"], [5], "batch has 4 entries"),
        (["rows"], [0], "Use fewer ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused(dims: list[str], ranks: list[int], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        cut_along(dims, ranks, LENGTHS)


def test_an_unknown_dim_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'columns'"):
        cut_along(["column"], [2], LENGTHS)
