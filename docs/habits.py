"""What may be done under which strategy: tables of docs/training.md, from the tests' verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["fuzz", "may_do"]

ROOT = Path(__file__).parent.parent
VERDICTS = ROOT / "tests" / "training" / "zoo" / "verdicts.json"
FUZZED = ROOT / "benchmarks" / "results" / "fuzz.json"
#: Columns, and the strategies of the tests that they stand for.
COLUMNS = {
    "`ddp`": ["ddp"],
    "`zero1`": ["zero1"],
    "`zero2`": ["zero2"],
    "`zero3`": ["zero3"],
    "`ps`": ["ps"],
    "`ps`, servers update": ["ps server", "ps servers"],
    "`ps-async`, `ps-ssp`": ["ps-async", "ps-ssp"],
}
RIGHT, NOT_ASKED = "right", "-"
USUAL = "InvalidArgumentError"  # is not named in every cell


def may_do() -> str:
    """Return, for each family of habits, those that are right everywhere and a table of others."""
    rows = json.loads(VERDICTS.read_text(encoding="utf-8"))
    lines: list[str] = []
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = [row for row in rows if row["family"] == family]
        told = {row["habit"]: [_word(row["verdicts"], ways) for ways in COLUMNS.values()]
                for row in mine}  # fmt: skip
        everywhere = [name for name, words in told.items() if set(words) == {RIGHT}]
        title = f"{family[0].upper()}{family[1:]}"
        lines += [f"**{title}.** Right under every strategy: {'; '.join(everywhere)}.", ""]
        others = {name: words for name, words in told.items() if name not in everywhere}
        if others:
            lines += [f"| | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
            lines += [f"| {name} | {' | '.join(map(_cell, words))} |"
                      for name, words in others.items()]  # fmt: skip
            lines.append("")
    return "".join(f"{line}\n" for line in lines[:-1])


def _word(verdicts: Mapping[str, Sequence[str]], ways: Sequence[str]) -> str:
    """Return what several ranks come to; where strategies differ, the refusal."""
    words = [next(word for word in reversed(verdicts[way]) if word != NOT_ASKED) for way in ways]
    return next((word for word in words if word != RIGHT), RIGHT)


def _cell(word: str) -> str:
    error = word.removeprefix("refused: ")
    return "yes" if word == RIGHT else "refused" if error == USUAL else f"`{error}`"


def fuzz() -> str:
    """Return what a long run of the fuzzer has found."""
    found = json.loads(FUZZED.read_text(encoding="utf-8"))
    counts = found["counts"]
    judged = sum(count for word, count in counts.items() if ": " in word)
    right = sum(count for word, count in counts.items() if word.endswith(": right"))
    return (
        f"A fuzzer draws models and loops at random and compares all strategies with one device, "
        f"and `ddp`, `zero1`, `zero2` and `zero3` bit for bit where they add up the same. "
        f"`{found['command']}`: {counts['programs']:,} programs in {judged:,} runs on 1 to 4 "
        f"ranks, {right:,} of them right and the others refused by name; "
        f"{counts['programs compared bit for bit']:,} programs bit for bit; "
        f"{len(found['defects'])} defects, in {found['minutes']:.0f} minutes on "
        f"{found.get('jobs', 1)} cores "
        f"(torch {found['torch']}, `benchmarks/results/fuzz.json`).\n"
    )
