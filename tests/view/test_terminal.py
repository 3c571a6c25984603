"""The terminal picture shows every frame truly, in every width."""

from __future__ import annotations

import pytest
from rich.console import Console

from roundelay.algorithms import algorithms
from roundelay.collectives.broadcast import broadcast
from roundelay.schedule import Cell, Schedule, Transfer, price
from roundelay.view import Picture, picture
from roundelay.view.terminal import FORMS, Drawing
from roundelay.view.terminal_text import ASCII, safe

SIZES = [1, 3, 8, 13]
WIDTHS = [30, 80, 400]


def render(drawing: Drawing, number: int) -> str:
    console = Console(width=drawing.width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(drawing.title(), drawing.frame(number), drawing.cost(), drawing.legend())
    return captured.get()


def drawn(name: str, size: int) -> Picture:
    schedule = algorithms.load(name).schedule(size)
    return picture(schedule, price=price(schedule, 4096))


def row_of(text: str, rank: int) -> list[str]:
    """Return the cells in a rank's row of an ASCII grid."""
    (row,) = (line for line in text.splitlines() if line.startswith(f"| GPU{rank} "))
    return [cell[1:-1] for cell in row.split("|")[2:-1]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", algorithms.names())
def test_every_width_holds(name: str, size: int) -> None:
    image = drawn(name, size)
    numbers = {0, len(image.frames) // 2, len(image.frames) - 1}
    forms = []
    for width in WIDTHS:
        for ascii_only in (False, True):
            drawing = Drawing(image, width=width, ascii_only=ascii_only)
            for number in numbers:
                text = render(drawing, number)
                assert max(map(len, text.splitlines())) <= width
                assert text.isascii() or not ascii_only
                assert f"tep {number} of {len(image.frames) - 1}" in text or number == 0
        forms.append(FORMS.index(drawing.form))
    assert forms == sorted(forms, reverse=True)  # more room, more told


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", algorithms.names())
def test_grid_tells_every_cell_and_marks_it(name: str, size: int) -> None:
    image = drawn(name, size)
    drawing = Drawing(image, width=2000, ascii_only=True)
    assert drawing.form == "full"
    for frame in image.frames:
        text = render(drawing, frame.number)
        for rank in range(size):
            for chunk, shown in enumerate(row_of(text, rank)):
                view = frame.cells.get(Cell(rank, chunk))
                if view is None:
                    assert shown.strip() == ""
                    continue
                lead = ">" if Cell(rank, chunk) in frame.changed else " "
                mark = "*" if view.done else " "
                assert shown.rstrip() == f"{lead}{safe(view.text, ASCII)}{mark}".rstrip()


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", algorithms.names())
def test_every_message_of_a_small_step_is_told(name: str, size: int) -> None:
    image = drawn(name, size)
    drawing = Drawing(image, width=2000, ascii_only=True)
    for frame in image.frames[1:]:
        text = render(drawing, frame.number)
        for transfer in frame.transfers:
            arrow = "-+>" if transfer.op == "reduce" else "-->"
            assert f"GPU{transfer.src} {arrow} GPU{transfer.dst}  " in text


@pytest.mark.parametrize("form", ["counts", "levels", "bars"])
def test_shorter_forms_agree_with_the_picture(form: str) -> None:
    image = drawn("all_reduce_ring", 8 if form != "bars" else 40)
    drawing = Drawing(image, width=80 if form == "counts" else 60, ascii_only=True)
    assert drawing.form == form
    for frame in image.frames:
        text = render(drawing, frame.number)
        done = sum(view.done for view in frame.cells.values())
        if form == "bars":
            finished = [line.split() for line in text.splitlines() if "of 40 chunks" in line]
            assert {int(words[words.index("of") - 1]) for words in finished} == {done // 40}
            continue
        for rank in range(8):
            cells = row_of(text, rank)
            views = [frame.cells[Cell(rank, chunk)] for chunk in range(8)]
            if form == "counts":
                found = [cell.strip(" >*") for cell in cells]
                assert found == [f"{len(view.ranks)}/8" for view in views]
            else:
                found = list(cells[0].strip())
                assert found == ["#" if view.done else str(len(view.ranks)) for view in views]


def test_crowded_steps_are_told_by_pattern() -> None:
    text = render(Drawing(drawn("all_reduce_one_shot", 8), width=120), 1)

    assert "GPU1…GPU7 ─+→ GPU0  a" in text or "GPU0 ─+→ GPU1…GPU7  a" in text
    assert "more like these" not in text


def test_hostile_names_stay_text() -> None:
    name = "[bold]\x1b[2J\u202e:smile:"
    schedule = Schedule(broadcast, 2, [Transfer(0, 0, 1, 0)], name=name)
    text = render(Drawing(picture(schedule, rank_name=name), width=100), 1)

    assert "[bold]?[2J?:smile:" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_real_numbers_are_listed_with_their_chunk() -> None:
    schedule = algorithms.load("all_to_all_direct").schedule(4)
    values = [
        {Cell(rank, chunk): f"[{chunk}]" for rank in range(4) for chunk in range(16)}
        for _ in range(2)
    ]
    drawing = Drawing(picture(schedule, values=values), width=80, ascii_only=True)

    assert drawing.form == "list"
    assert "0->0=[0]*" in render(drawing, 0)
    assert "3->0=[12]*" in render(drawing, 1)
