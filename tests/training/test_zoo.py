"""The zoo: what people train, and how, is right under every strategy, or refused by name.

A change of any verdict is seen here; `python tests/training/verdicts.py` judges all cells and
writes them down. `ROUNDELAY_ZOO=all` has the tests judge all of them too, in place of a sample,
and then what has become right must be written down as well.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("torch")

from roundelay import errors
from verdicts import FILE, HABITS, SIZES, cells, kept, verdicts, written

KEPT = kept()
WHOLE = os.environ.get("ROUNDELAY_ZOO") == "all"


def between(number: int) -> list[tuple[str, int]]:
    """On two or three ranks by turns: what holds most and what holds least, and some between."""
    size = (2, 3)[number % 2]
    zero = ("zero1", "zero2")[number // 2 % 2]
    server = ("ps", "ps server", "ps servers", "ps-async", "ps-ssp")[number % 5]
    wanted = {("ddp", size), (zero, size), ("zero3", size), (server, size), (server, 1)}
    return [cell for cell in cells() if cell in wanted]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HABITS)
def test_it_is_right_or_refused_by_name(name: str, sample: Any) -> None:
    wanted = list(cells()) if WHOLE else sample.some(between(list(HABITS).index(name)), 3)
    found = verdicts(HABITS[name], wanted)
    worse = {
        cell: one
        for cell, one in found.items()
        if one.word not in (before(name, *cell), *(() if WHOLE else ("right",)))
    }
    assert worse == {}


def before(name: str, way: str, size: int) -> str:
    return KEPT[name][way][SIZES.index(size)]


def test_every_habit_has_a_verdict_that_is_right_or_an_error_of_ours() -> None:
    assert FILE.read_text(encoding="utf-8") == written({name: KEPT[name] for name in HABITS})
    words = {word for row in KEPT.values() for each in row.values() for word in each}
    refusals = {name for word in words - {"right", "-"}
                for name in word.removeprefix("refused: ").split(", ")}  # fmt: skip
    assert refusals <= set(errors.__all__)
    assert len(HABITS) >= 25
