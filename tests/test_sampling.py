"""`make test` runs a sample of the large grids: by its seed, with every value, and all in time."""

from __future__ import annotations

import random
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
GRIDS = [(1,), (9,), (2, 3), (7, 39), (5, 4, 6), (2, 2, 2, 20)]
SEEDS = [f"seed {number}" for number in range(5)]


@pytest.fixture(scope="module")
def settings(pytestconfig: pytest.Config) -> Any:
    """`tests/conftest.py`, which is a plugin here and no module to import."""
    (found,) = (one for one in pytestconfig.pluginmanager.get_plugins() if hasattr(one, "SAMPLED"))
    return found


def cells_of(shape: tuple[int, ...], *, idle: bool = False) -> list[Any]:
    """Make stand-ins of tests, one for each cell; of `idle` ones the first value is skipped."""
    return [
        SimpleNamespace(
            at=at,
            callspec=SimpleNamespace(params={f"p{n}": value for n, value in enumerate(at)}),
            iter_markers=lambda _, at=at: [SimpleNamespace(args=(idle and at[0] == 0,))],
        )
        for at in product(*map(range, shape))
    ]


def drawn(settings: Any, cells: list[Any], one_in: int, seed: str) -> list[tuple[int, ...]]:
    return [cell.at for cell in settings.sampled(cells, one_in, random.Random(seed))]


@pytest.mark.parametrize("one_in", [1, 2, 4, 10])
@pytest.mark.parametrize("shape", GRIDS)
def test_a_sample_has_every_value_and_is_small(
    settings: Any, shape: tuple[int, ...], one_in: int
) -> None:
    cells = cells_of(shape)
    for seed in SEEDS:
        found = drawn(settings, cells, one_in, seed)
        assert len(set(found)) == len(found)
        assert [{*values} for values in zip(*found, strict=True)] == [{*range(n)} for n in shape]
        assert len(cells) / one_in <= len(found) <= max(-(-len(cells) // one_in), sum(shape))
        assert found == drawn(settings, cells, one_in, seed)


@pytest.mark.parametrize("shape", GRIDS[2:])
def test_seeds_draw_different_cells_and_all_in_the_end(
    settings: Any, shape: tuple[int, ...]
) -> None:
    cells = cells_of(shape)
    samples = [frozenset(drawn(settings, cells, 3, f"{number}")) for number in range(60)]
    assert len({*samples}) > 1
    assert frozenset.union(*samples) == {cell.at for cell in cells}


@pytest.mark.parametrize("one_in", [2, 4, 10])
def test_what_is_skipped_here_stands_for_nothing(settings: Any, one_in: int) -> None:
    cells = cells_of((4, 30), idle=True)
    for seed in SEEDS:
        found = drawn(settings, cells, one_in, seed)
        assert {at[1] for at in found if at[0] != 0} == {*range(30)}
        assert len([at for at in found if at[0] == 0]) == 1


def test_a_walk_visits_every_point_or_those_of_the_seed(settings: Any) -> None:
    def walk(seed: str | None) -> list[int]:
        return list(islice(settings.Sample(seed, "name").points(6), 50))

    assert walk(None) == list(range(1, 51))
    walks = [walk(f"{number}") for number in range(40)]
    for found in walks:
        assert all(0 < later - one < 12 for one, later in zip([0, *found], found, strict=False))
    assert {*range(1, 100)} <= {point for found in walks for point in found}
    assert walks[3] == walk("3")


@pytest.mark.parametrize("one_in", [1, 3, 10])
@pytest.mark.parametrize("shape", GRIDS)
def test_a_grid_inside_a_test_is_visited_whole_or_with_every_value(
    settings: Any, shape: tuple[int, ...], one_in: int
) -> None:
    grid = list(product(*map(range, shape)))
    assert settings.Sample(None, "name").cells(grid, one_in) == grid
    for seed in SEEDS:
        found = settings.Sample(seed, "name").cells(grid, one_in)
        assert found == sorted({*found})
        assert [{*values} for values in zip(*found, strict=True)] == [{*range(n)} for n in shape]
        assert len(grid) / one_in <= len(found) <= max(-(-len(grid) // one_in), sum(shape))
        few = settings.Sample(seed, "name").some(grid, one_in)
        assert len({*few} & {*grid}) == len(few) == -(-len(grid) // one_in)


class Item:
    """Stands in for a test."""

    def __init__(self, file: str, name: str, cell: Any) -> None:
        self.nodeid, self.path = f"{file}::{name}[{cell.at}]", Path(file)
        self.callspec, self.iter_markers = cell.callspec, cell.iter_markers


class Config:
    """Stands in for pytest's: a seed, and nobody who listens."""

    def __init__(self, seed: str | None) -> None:
        self.hook = SimpleNamespace(pytest_deselected=lambda **_: None)
        self.getoption = {"--sample": seed}.__getitem__


@pytest.mark.parametrize("file", ["engines/test_one_truth.py", "none/test_of_these.py"])
def test_no_function_is_left_out(settings: Any, file: str) -> None:
    """Small ones are whole, and of every other there are cells; without a seed there are all."""
    every = [
        Item(file, f"test_{size}", cell)
        for size in (2, 12, 14, 40)
        for cell in cells_of((size // 2, 2))
    ]
    for seed in (None, *SEEDS):
        items = list(every)
        settings.leave_out(Config(seed), items)
        names = [item.nodeid.split("[")[0] for item in items]
        assert {*names} == {one.nodeid.split("[")[0] for one in every}
        assert (len(items) == len(every)) == (seed is None)
        if file not in settings.SAMPLED:
            assert names.count(f"{file}::test_12") == 12


def test_the_large_grids_are_there(settings: Any) -> None:
    for name in settings.SAMPLED:
        assert "parametrize" in (ROOT / "tests" / name).read_text(encoding="utf-8"), name
