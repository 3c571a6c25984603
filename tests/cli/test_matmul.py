"""`roundelay explain matmul`: what it draws is what ran, and what can't be drawn is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from click.testing import Result

from roundelay.contraction import DIMS, PRODUCTS, cut_along
from roundelay.launch import cut_matmul
from roundelay.launch.cut_matmul import run_cube
from roundelay.view.cube import cube_picture

LENGTHS = {"b": 3, "s": 4, "h": 5, "o": 6}
GRIDS = [
    (dims, ranks)
    for count in (1, 2, 3)
    for dims in combinations(DIMS, count)
    for ranks in product((2, 3), repeat=count)
    if count < 3 or ranks == (2, 2, 2)
]


@pytest.mark.parametrize(("dims", "ranks"), GRIDS, ids=str)
def test_ranks_compute_what_one_device_does(dims: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    """Also where lengths do not divide: the pieces differ, and the sums do not."""
    cube = cut_along(list(dims), list(ranks), LENGTHS)
    run = run_cube(cube)
    picture = cube_picture(cube, run)
    assert picture.agrees
    assert "bit for bit" in picture.verdict
    for rank in range(cube.size):
        for tensor in ("X", "W", "Y", "dX", "dW", "dY"):
            if tensor in run.shapes[rank]:
                assert run.shapes[rank][tensor] == cube.shape(rank, tensor)
    for each in PRODUCTS:
        groups, ran = cube.groups(each), run.products[each.result]
        assert ran.difference == 0
        for group in groups:
            whole = run.nbytes[group[0]][each.result]
            # Around the ring: N - 1 steps out of N, to add up and again to hand on.
            assert sum(ran.sent[rank] for rank in group) == 2 * (len(group) - 1) * whole
        if not groups:
            assert not any(ran.sent)


def test_a_product_that_differs_is_told(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave out the all-reduce: the picture must not say that all is well."""
    monkeypatch.setattr(cut_matmul, "_all_reduced", lambda *_: 0)
    result = run("explain", "matmul", "--split", "rows")
    assert result.exit_code == 1
    assert "differ from those of one device by" in result.stdout
    assert "bit for bit" not in result.stdout


@pytest.mark.parametrize(
    ("split", "moves"),
    [
        ("batch", ["nothing moves", "nothing moves", "all-reduce of dW over ranks 0 1"]),
        ("sequence", ["nothing moves", "nothing moves", "all-reduce of dW over ranks 0 1"]),
        ("rows", ["all-reduce of Y over ranks 0 1", "nothing moves", "nothing moves"]),
        ("columns", ["nothing moves", "all-reduce of dX over ranks 0 1", "nothing moves"]),
        ("none", ["nothing moves", "nothing moves", "nothing moves"]),
        ("rows,columns", ["all-reduce of Y over ranks 0 2 | 1 3",
                          "all-reduce of dX over ranks 0 1 | 2 3", "nothing moves"]),
    ],
)  # fmt: skip
def test_the_terminal_says_what_moves(
    run: Callable[..., Result], split: str, moves: list[str]
) -> None:
    result = run("explain", "matmul", "--split", split, "--ascii")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.isascii()
    words = [line[2:].strip() for line in result.stdout.splitlines()
             if line.startswith(("* ", "-> "))]  # fmt: skip
    assert words[:3] == moves


@pytest.mark.parametrize("width", ["40", "80", "200"])
@pytest.mark.parametrize("arguments", [["--split", "columns", "-n", "16"],
                                       ["--split", "batch,sequence", "-n", "4,4"]])  # fmt: skip
def test_many_ranks_are_drawn_too(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, arguments: list[str], width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    result = run("explain", "matmul", *arguments)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= int(width)


def test_files_are_written(run: Callable[..., Result], tmp_path: Path) -> None:
    page, drawing = tmp_path / "cube.html", tmp_path / "cube.svg"
    files: list[Any] = ["--out", str(page), "--out", str(drawing)]
    result = run("explain", "matmul", "--split", "batch,columns", "-n", "2,3", *files)
    assert (result.exit_code, result.stdout) == (0, "")
    root = ET.fromstring(drawing.read_text(encoding="utf-8"))
    words = " ".join(text for text in root.itertext())
    assert "all-reduce dX" in words
    assert "all-reduce dW" in words
    assert "0+1+2" in words
    assert "0+3" in words
    assert "bit for bit" in words
    assert "0+1+2" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--split", "heads"], "the matrix product has no 'heads'"),
        (["--split", "batch,batch"], "cut twice"),
        (["--split", "batch", "-n", "2,3"], "need a number of ranks each"),
        (["-n", "0"], "-n takes whole numbers from 1 to 16"),
        (["-n", "two"], "-n takes whole numbers"),
        (["-n", "5,5", "--split", "rows,columns"], "too much to draw"),
        (["--shape", "1,2,3"], "--shape takes the lengths of b, s, h and o"),
        (["--shape", "1,2,3,4", "--split", "batch"], "batch has 1 entries"),
        (["--out", "cube.json"], "must end in .html"),
        (["--out", "nowhere/cube.svg"], "there is no folder nowhere"),
    ],
)
def test_wrong_use_is_refused(run: Callable[..., Result], arguments: list[str], words: str) -> None:
    result = run("explain", "matmul", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_it_has_help_of_its_own(run: Callable[..., Result]) -> None:
    assert "--split" in run("explain", "matmul", "--help").stdout
    assert "--split" not in run("explain", "--help").stdout.partition("Examples")[0]
