"""Pictures of attention: every cell that is seen is computed once, and drawn where it is."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from roundelay.cli._group import roundelay
from roundelay.view.attention import lines, ring_picture, ulysses_picture
from roundelay.view.attention_svg import attention_html, attention_svg


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [False, True])
def test_every_cell_is_computed_once_by_who_has_its_queries(
    causal: bool,  # noqa: FBT001
    layout: str,
    size: int,
) -> None:
    picture = ring_picture(size, layout, causal=causal)
    cells = [(place, rank) for frame in picture.frames for place, rank in frame.now.items()]
    square = {(row, column) for row in range(len(picture.rows))
              for column in range(len(picture.columns))}  # fmt: skip
    assert len(cells) == len(dict(cells))
    assert dict(cells).keys() | picture.hidden == square
    assert all(picture.owners[row] == rank for (row, _), rank in cells)
    text = lines(picture)
    digits = "".join(line[6:] for line in text if re.match(r"\d+ ", line))
    assert len(re.findall(r"\d+", digits)) == len(cells)
    drawn = attention_svg([picture])
    ET.fromstring(drawn)
    assert len(re.findall(r'<path class="r', drawn)) == len(cells)
    assert all(line.isascii() for line in lines(picture, ascii_only=True))


def test_heads_for_tokens() -> None:
    before, between, after = ulysses_picture(3, "zigzag", causal=True).frames
    assert before.now == after.now
    assert all(rank == row for (row, _), rank in between.now.items())


def test_the_page_has_every_step_and_no_script() -> None:
    page = attention_html(ring_picture(4, "zigzag", causal=True))
    assert page.count("<svg") == 4
    assert "<script" not in page


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(roundelay, ["explain", "attention", *words])
    return done.exit_code, done.output


def test_the_command(tmp_path: Path) -> None:
    code, told = run("--layout", "zigzag")
    assert code == 0
    assert told.count("Step ") == 4
    assert run("--method", "ulysses")[0] == 0
    files = [tmp_path / "a.svg", tmp_path / "a.html"]
    assert run("-o", str(files[0]), "--layout", "both")[0] == 0
    assert run("-o", str(files[1]), "--full", "-n", "3")[0] == 0
    assert all(file.stat().st_size > 1000 for file in files)
    for words in (["-n", "0"], ["-n", "33"], ["-o", "a.png"], ["--layout", "both", "-o", "a.html"],
                  ["--layout", "zig"], ["-o", str(tmp_path / "none" / "a.svg")]):  # fmt: skip
        assert run(*words)[0] == 2
    assert "--layout" in run("--help")[1]


@pytest.mark.parametrize("size", [2, 4, 5, 8, 16, 40])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_names_of_columns_are_apart_and_cells_have_the_numbers_that_are_promised(
    layout: str, size: int
) -> None:
    picture = ring_picture(size, layout, causal=True)
    root = ET.fromstring(attention_svg([picture]))
    texts = [(one.get("class", "").split(), float(one.get("x", 0)), float(one.get("y", 0)),
              one.text or "") for one in root.iter() if one.tag.endswith("text")]  # fmt: skip
    above = [(x, y, name) for kind, x, y, name in texts if kind == ["above"]]
    assert above
    for (x, y, name), (right, below, other) in itertools.pairwise(above):
        if below == y and right > x:
            assert right - x >= 3 * (len(name) + len(other)) + 2  # half of each, at 6 a letter
    numbers = sum(kind[:1] == ["num"] for kind, *_ in texts)
    promised = "the number and colour" in " ".join(words for *_, words in texts)
    cells = sum(len(frame.now) for frame in picture.frames)
    assert numbers == (cells if promised else 0)
