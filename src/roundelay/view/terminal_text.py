"""How amounts and names read in a terminal: bytes, seconds, runs of ranks, safe text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "ASCII",
    "UNICODE",
    "Glyphs",
    "nbytes_text",
    "number_of",
    "runs_of",
    "safe",
    "seconds_text",
    "short_sum",
    "three_digits",
]


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The signs of a drawing; copy and reduce differ in shape, not only in colour."""

    copy: str
    reduce: str
    arrow: str
    changed: str
    done: str
    failed: str
    to: str  # between the ends of a run: a0…3
    more: str  # something was left out
    dot: str  # between facts on one line
    full: str
    empty: str
    levels: str  # how much of a cell has arrived, from nothing to everything
    micro: str


#: Each sign in Unicode, and where only ASCII is wanted.
SIGNS = {
    "copy": ("──→", "-->"),
    "reduce": ("─+→", "-+>"),
    "arrow": ("→", "->"),
    "changed": ("▸", ">"),
    "done": ("✓", "*"),
    "failed": ("✗", "!"),
    "to": ("…", ".."),
    "more": ("…", "..."),
    "dot": (" · ", ", "),
    "full": ("━", "="),
    "empty": ("─", "-"),
    "levels": ("·▁▂▃▄▅▆▇█", ".1234567#"),
    "micro": ("µ", "u"),
}
UNICODE = Glyphs(**{name: signs[0] for name, signs in SIGNS.items()})
ASCII = Glyphs(**{name: signs[1] for name, signs in SIGNS.items()})

#: Our own signs, where only ASCII is wanted.
SPELLED = str.maketrans({"→": ASCII.arrow, "…": ASCII.to, "·": ",", "µ": ASCII.micro})

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def number_of(count: int, word: str) -> str:
    """Count things: 1 step, 3 steps."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def nbytes_text(nbytes: float) -> str:
    """Write a number of bytes in three digits.

    >>> [nbytes_text(n) for n in (0, 1000, 1536, 1 << 20, 1.75 * (1 << 30))]
    ['0 B', '1000 B', '1.5 KiB', '1 MiB', '1.75 GiB']
    """
    unit, base = 0, 1024
    while nbytes >= base and unit < len(BYTE_UNITS) - 1:
        nbytes, unit = nbytes / base, unit + 1
    digits = three_digits(nbytes) if unit else f"{nbytes:.4g}"
    return f"{digits} {BYTE_UNITS[unit]}"


def seconds_text(seconds: float, glyphs: Glyphs = UNICODE) -> str:
    """Write a time in three digits.

    >>> [seconds_text(s) for s in (0.0, 2.5e-9, 0.0000123, 0.0021, 75.2)]
    ['0 s', '2.5 ns', '12.3 µs', '2.1 ms', '75.2 s']
    """
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, f"{glyphs.micro}s")):
        if seconds * factor >= 1:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds * 1e9)} ns"


def three_digits(value: float) -> str:
    """Write a number in three digits, or in whole ones."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"  # noqa: PLR2004 - no 1e+03


def short_sum(name: str, ranks: Sequence[int], glyphs: Glyphs = UNICODE) -> str:
    """Write `a0+a1+a2+a5` as `a0…2+5`: runs of ranks, in the order they were folded.

    >>> short_sum("a", [0, 1, 2, 5]), short_sum("b", [3]), short_sum("c", [4, 5, 0])
    ('a0…2+5', 'b3', 'c4+5+0')
    """
    shown = [
        f"{run[0]}{glyphs.to}{run[-1]}" if len(run) > 2 else "+".join(map(str, run))  # noqa: PLR2004
        for run in _runs(ranks)
    ]
    return name + "+".join(shown)


def runs_of(names: Sequence[str], indices: Iterable[int], glyphs: Glyphs = UNICODE) -> str:
    """Name many ranks briefly.

    >>> runs_of(["r0", "r1", "r2", "r3", "r4"], [0, 1, 2, 4])
    'r0…r2 r4'
    """
    return " ".join(
        names[run[0]] if len(run) == 1 else f"{names[run[0]]}{glyphs.to}{names[run[-1]]}"
        for run in _runs(sorted(indices))
    )


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Cut numbers where the next one is not one more."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def safe(text: str, glyphs: Glyphs = UNICODE) -> str:
    r"""Make a stranger's text fit to print: no control codes, and only ASCII where asked.

    >>> safe("a\x1b[2Jb"), safe("naïve", ASCII), safe("2→5", ASCII)
    ('a?[2Jb', 'na\\xefve', '2->5')
    """
    text = "".join(char if char.isprintable() else "?" for char in text)
    if glyphs is ASCII:
        return text.translate(SPELLED).encode("ascii", "backslashreplace").decode("ascii")
    return text
