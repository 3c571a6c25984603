"""What options of several commands have in common: sizes in bytes, ranges, the console."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from decimal import Decimal, InvalidOperation
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.measure import Measurement

from roundelay.view.languages import LANGUAGES
from roundelay.view.terminal_text import ASCII, UNICODE, Glyphs

UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1 << 10 * power for power, letter in enumerate("kmgt", start=1)},
}
MOST_BYTES = 1 << 60
SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
MOST_COUNT = 10**18  # beyond all models
COUNTS = "7.5e9, 7.5B or 125M"
#: More ranks than this can be estimated by a program, but hardly waited for at a prompt.
MOST_RANKS = 1024
PIPED_WIDTH = 120
MOST_WIDTH = 1000


class NBytes(click.ParamType[int]):
    """A number of bytes: 1MiB, 64KiB, 1e6, 1MB."""

    name = "size"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:  # click hands over strings and defaults alike
        """Read a number and a unit."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(
            r"([+-]?[0-9.]+(?:e[+-]?[0-9]{1,3})?)\s*([a-z]*)", value.strip().lower()
        )
        try:
            number = Decimal(match[1]) if match else None  # 1.13TB is not a byte less
        except InvalidOperation:
            number = None
        if match is None or number is None or match[2] not in UNITS:
            self.fail(f"'{value}' is not a size; write 1MiB, 64KiB, 1MB, 1e6 or 4096.", param, ctx)
        nbytes = number * UNITS[match[2]]
        if not 1 <= nbytes <= MOST_BYTES:
            self.fail(f"'{value}' is not between 1 byte and 1024 PiB.", param, ctx)
        return int(nbytes)


class Count(click.ParamType[float]):
    """A large number: 7.5e9, 7.5B, 125M."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:  # click hands over strings and defaults alike
        """Read a number and a letter."""
        found = re.fullmatch(
            r"([+-]?[0-9.]+(?:e[+-]?[0-9]{1,3})?)\s*([kmbgt]?)", str(value).strip().lower()
        )
        try:
            number = Decimal(found[1]) * SCALES[found[2]] if found else None
        except InvalidOperation:
            number = None
        if number is None:
            self.fail(f"'{value}' is not a number; write {COUNTS}.", param, ctx)
        if not 1 <= number <= MOST_COUNT:
            self.fail(f"'{value}' is not between 1 and 1e18; write {COUNTS}.", param, ctx)
        return float(number)


class FiniteRange(click.FloatRange):
    """A number in a range, and neither nan nor infinite: comparisons let nan pass."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:  # click hands over strings and defaults alike
        """Read a number."""
        number: float = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"'{value}' is not in the range {self._describe_range()}.", param, ctx)
        found: float = super().convert(number, param, ctx)
        return found


class Sizes(click.ParamType[list[int]]):
    """Numbers of ranks: 8, 1-16, or 2,4,8."""

    name = "sizes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:  # click hands over strings and defaults alike
        """Read a list of numbers and ranges."""
        if isinstance(value, list):
            return value
        sizes: set[int] = set()
        for item in str(value).split(","):
            match = re.fullmatch(r"\s*([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?\s*", item)
            if not match:
                self.fail(f"'{value}' is not a list of sizes; write 1-16, or 2,4,8.", param, ctx)
            low, high = int(match[1]), int(match[2] or match[1])
            if low > high:
                self.fail(f"'{item.strip()}': write {high}-{low}, the smaller first.", param, ctx)
            if low < 1 or high > MOST_RANKS:
                self.fail(
                    f"'{item.strip()}': the command line takes 1 to {MOST_RANKS} ranks.", param, ctx
                )
            sizes.update(range(low, high + 1))
        return sorted(sizes)


NBYTES = NBytes()
COUNT = Count()
SIZES = Sizes()

bytes_option = click.option(
    "--bytes",
    "nbytes",
    type=NBYTES,
    default="1MiB",
    show_default=True,
    help="The largest buffer a rank passes in or gets back: 64KiB, 1e6.",
)
network_option = click.option(
    "--network",
    default="switch",
    show_default=True,
    metavar="NETWORK",
    help="Network to estimate costs on: a name, with options (hosts:per_host=4), or a JSON file.",
)


language_option = click.option(
    "--lang", "language", type=click.Choice(LANGUAGES), default="en", show_default=True,
    help="Language of stories and pages.",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")


def _glyphs(_: click.Context, __: click.Parameter, asked: bool) -> Glyphs:  # noqa: FBT001 - click
    return ASCII if wants_ascii(asked=asked) else UNICODE


glyphs_option = click.option(
    "--ascii", "glyphs", is_flag=True, callback=_glyphs, help="Plain ASCII only."
)


def wants_ascii(*, asked: bool) -> bool:
    """Tell whether to write plain ASCII: on request, or where the terminal can't do better."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return asked or not encoding.lower().startswith("utf")


def console_for(*, fit: RenderableType | None = None) -> Console:
    """Return a console on standard output; piped text has no control codes and a fixed width.

    What must `fit` gets the room it needs when piped, so that a line stays a line for grep.
    """
    width, height = terminal_size()
    if not sys.stdout.isatty() and not _asked_width():
        width = PIPED_WIDTH
        if fit is not None:
            wide = Console(file=sys.stdout, width=MOST_WIDTH, height=height)
            width = Measurement.get(wide, wide.options, fit).maximum
    return _Console(
        file=sys.stdout, width=width, height=height, highlight=False, emoji=False, markup=False
    )


class _Console(Console):
    """A console that leaves it to the command line what to do when nobody reads on."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def terminal_size() -> tuple[int, int]:
    """Return how many columns and lines to write in: what COLUMNS says if that can be, or all."""
    terminal = shutil.get_terminal_size()
    return min(_asked_width() or terminal.columns, MOST_WIDTH), terminal.lines


def console_on_errors() -> Console:
    """Return a console on standard error, for what shows progress."""
    width, height = terminal_size()  # both: else rich reads COLUMNS itself, and believes all of it
    return Console(stderr=True, width=width, height=height)


def _asked_width() -> int:
    """Return what COLUMNS asks for; 0 where it says nothing that can be."""
    asked = os.environ.get("COLUMNS", "")
    return int(asked[:9]) if asked.isascii() and asked.isdigit() else 0
