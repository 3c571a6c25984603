"""The verdict of every habit under every strategy, on every number of ranks: kept in one file.

    python tests/training/verdicts.py                 judge everything, and write the file anew
    python tests/training/verdicts.py "LSTM"          judge what has this in its name, and show it

`docs/training.md` has its table of what may be done under which strategy from there.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from zoo import (
    architectures,
    copies,
    derivatives,
    edits,
    gradients,
    habits,
    layers,
    loops,
    losses,
    recipes,
    transformers,
)
from zoo.habits import Habit
from zoo.place import SIZES, WAYS, Verdict, alone, judge

__all__ = ["FAMILIES", "FILE", "HABITS", "SIZES", "cells", "kept", "verdicts", "written"]

FILE = Path(__file__).parent / "zoo" / "verdicts.json"
#: The files that fill HABITS.
FAMILIES = (
    transformers,
    architectures,
    layers,
    losses,
    derivatives,
    loops,
    recipes,
    gradients,
    edits,
    copies,
)
#: Every habit, by name, in the order of these files.
HABITS = {
    name: one
    for family in FAMILIES
    for name, one in habits.HABITS.items()
    if one.program.__module__ == family.__name__
}
ASYNCHRONOUS = ("ps-async", "ps-ssp")
NOT_ASKED = "-"  # what asynchronous workers come to depends on who is first; two servers need two

Kept = dict[str, dict[str, list[str]]]


def cells(sizes: Iterable[int] = SIZES) -> Iterator[tuple[str, int]]:
    """Yield the strategies and numbers of ranks that a habit is judged under."""
    for size in sizes:
        for way in WAYS:
            if (size == 1 or way not in ASYNCHRONOUS) and (size > 1 or way != "ps servers"):
                yield way, size


def verdicts(habit: Habit, wanted: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Verdict]:
    """Judge one habit in some cells."""
    expected = {}
    found = {}
    for way, size in wanted:
        if size not in expected:
            expected[size] = alone(habit.program, size)
        found[way, size] = judge(habit.program, WAYS[way], size, expected[size], habit.engine)[0]
    return found


def kept() -> Kept:
    """Read the file: by habit and strategy, a word for each number of ranks."""
    return {row["habit"]: row["verdicts"] for row in json.loads(FILE.read_text(encoding="utf-8"))}


def written(rows: Kept) -> str:
    """The file, a line for each habit, so that a change is one line."""
    lines = [
        json.dumps({"family": HABITS[name].family, "habit": name, "verdicts": row})
        for name, row in rows.items()
    ]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    rows: Kept = {}
    bad = 0
    for name, habit in HABITS.items():
        if wanted not in name:
            continue
        found = verdicts(habit, cells())
        rows[name] = {way: [found[way, size].word if (way, size) in found else NOT_ASKED
                            for size in SIZES] for way in WAYS}  # fmt: skip
        strange = {cell: one for cell, one in found.items() if not one.good}
        bad += len(strange)
        sys.stdout.write(f"{name}: {len(found)} cells\n")
        for (way, size), one in (found if wanted else strange).items():
            sys.stdout.write(f"    {way}, {size} ranks: {one.word} {one.told[:300]}\n")
        sys.stdout.flush()
    if not wanted and not bad:
        FILE.write_text(written(rows), encoding="utf-8")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
