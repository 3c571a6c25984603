"""What every contract promises, checked for every file in the folder."""

from __future__ import annotations

from typing import Any

import pytest

from roundelay.collectives import Collective, collectives, letter
from roundelay.errors import InvalidArgumentError
from roundelay.schedule import Schedule

every_collective = pytest.mark.parametrize("name", collectives.names())
SIZES = range(1, 10)


def grid(contract: Collective) -> list[tuple[int, int]]:
    return [(size, root) for size in SIZES for root in range(size if contract.rooted else 1)]


def before(contract: Collective, size: int, root: int) -> set[tuple[int, int]]:
    return {(rank, block) for rank in range(size) for block in contract.before(size, root, rank)}


@every_collective
def test_promises_only_what_somebody_brings(name: str) -> None:
    contract = collectives.load(name)
    for size, root in grid(contract):
        held = before(contract, size, root)
        assert {block for _, block in held} <= set(range(contract.blocks(size)))
        for rank in range(size):
            for block, sources in contract.after(size, root, rank).items():
                ranks = list(sources)
                assert 0 <= block < contract.blocks(size)
                assert ranks and len(set(ranks)) == len(ranks)
                assert all((source, block) in held for source in ranks)


@every_collective
def test_every_block_is_brought_and_used(name: str) -> None:
    contract = collectives.load(name)
    for size, root in grid(contract):
        blocks = set(range(contract.blocks(size)))
        brought = {block for _, block in before(contract, size, root)}
        due = {b for rank in range(size) for b in contract.after(size, root, rank)}
        assert brought == blocks
        assert due == blocks or (name, size) == ("exscan", 1)


@every_collective
def test_adds_up_only_if_it_says_so(name: str) -> None:
    contract = collectives.load(name)
    most = max(
        len(list(sources))
        for size, root in grid(contract)
        for rank in range(size)
        for sources in contract.after(size, root, rank).values()
    )
    assert (most > 1) == contract.reduces


@every_collective
def test_depends_on_the_root_only_if_it_says_so(name: str) -> None:
    contract = collectives.load(name)

    def shape(root: int) -> list[object]:
        return [
            (list(contract.before(4, root, rank)),
             {b: set(ranks) for b, ranks in contract.after(4, root, rank).items()})
            for rank in range(4)
        ]  # fmt: skip

    assert (shape(0) != shape(3)) == contract.rooted


@every_collective
def test_size_one_has_nothing_to_do(name: str) -> None:
    contract = collectives.load(name)
    held = before(contract, 1, 0)
    assert all((0, block) in held for block in contract.after(1, 0, 0))
    assert list(Schedule(contract, 1, []).steps) == []


@every_collective
def test_the_largest_buffer_is_counted(name: str) -> None:
    contract = collectives.load(name)
    for size, root in grid(contract):
        wide = name in {"scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"}
        assert contract.per_rank(size, root) == (size if wide else 1)


@every_collective
def test_the_picture_has_a_line_per_rank(name: str) -> None:
    contract = collectives.load(name)
    for size, root in grid(contract):
        head, *rows = contract.picture(size, root).splitlines()
        assert head.split() == ["before", "after"]
        assert [row.split()[:2] for row in rows] == [["rank", str(r)] for r in range(size)]


@every_collective
@pytest.mark.parametrize("value", [0, -3, 2.0, True, "2", None])
def test_refuses_what_is_no_size(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{name} needs .* not {value!r}"):
        collectives.load(name).check(value)


@every_collective
@pytest.mark.parametrize("value", [-1, 3, 1.0, False, "0", None])
def test_refuses_what_is_no_root(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="root"):
        collectives.load(name).check(3, value)


def test_gather_undoes_scatter_and_all_gather_undoes_reduce_scatter() -> None:
    load = collectives.load
    for size in SIZES:
        for rank in range(size):
            scattered = list(load("scatter").after(size, 0, rank))
            assert scattered == list(load("gather").before(size, 0, rank))
            reduced = list(load("reduce_scatter").after(size, 0, rank))
            assert reduced == list(load("all_gather").before(size, 0, rank))


def test_all_to_all_is_a_transpose() -> None:
    contract = collectives.load("all_to_all")
    for size in SIZES:
        given = {rank: list(contract.before(size, 0, rank)) for rank in range(size)}
        got = {rank: list(contract.after(size, 0, rank)) for rank in range(size)}
        assert all(got[d][s] == given[s][d] for s in range(size) for d in range(size))


def test_letters_count_like_spreadsheet_columns() -> None:
    names = [letter(index) for index in range(26 + 26**2 + 26**3)]
    assert names == sorted(set(names), key=lambda name: (len(name), name))
    assert (names[0], names[-1]) == ("a", "zzz")
