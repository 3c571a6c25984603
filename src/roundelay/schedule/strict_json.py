"""JSON from strangers: read in bounded time and memory, and every complaint names its place."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from roundelay.errors import FormatError, ScheduleError, UnknownNameError

__all__ = ["MAX_BYTES", "DocumentPath", "is_name", "parse", "read"]

#: The most that is read of a file.
MAX_BYTES = 64 * 2**20
#: The most brackets, colons and commas in a text: what bounds the memory that parsing takes.
MAX_TOKENS = 12_000_000
#: The most digits of a whole number; every limit on a value is far below.
MAX_DIGITS = 18
LONG_RUN = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}")
#: The most characters of a name.
MAX_NAME = 200
#: The most characters of a value that an error shows.
SHOWN = 60


@dataclass(frozen=True, slots=True)
class DocumentPath:
    """Where in a document we are, and the error to raise there."""

    path: str
    error: type[FormatError] = ScheduleError

    def fail(self, problem: str) -> NoReturn:
        """Raise the error of this place."""
        raise self.error(self.path, problem)

    def inside(self, part: str) -> DocumentPath:
        """Return a place below the document itself, or the line of a text."""
        return DocumentPath(f"{self.path}: {part}", self.error)

    def item(self, index: int) -> DocumentPath:
        """Return the place of an item of the list at this place."""
        return DocumentPath(f"{self.path}[{index}]", self.error)

    def field(self, name: str) -> DocumentPath:
        """Return the place of a field of the item at this place."""
        return DocumentPath(f"{self.path}.{name}", self.error)

    def whole(self, value: object, low: int, high: int) -> int:
        """Return `value` if it is a whole number from `low` to `high`."""
        if type(value) is not int or not low <= value <= high:
            range_ = f"a whole number from {low} to {high}" if low < high else f"{low}"
            self.fail(f"must be {range_}, not {_shown(value)}")
        return value

    def number(self, value: object) -> float:
        """Return `value` if it is a number; which ones make sense is for the caller to say."""
        if type(value) is not int and type(value) is not float:
            self.fail(f"must be a number, not {_shown(value)}")
        return value

    def name(self, value: object) -> str:
        """Return `value` if it is a text fit to be shown as a name."""
        if not isinstance(value, str) or not is_name(value):
            self.fail(f"must be 1 to {MAX_NAME} printable characters, not {_shown(value)}")
        return value

    def list(self, value: object, most: int) -> list[object]:
        """Return `value` if it is a list of at most `most` items."""
        if not isinstance(value, list):
            self.fail(f"must be a list, not {_shown(value)}")
        if len(value) > most:
            self.fail(f"has {len(value):,} items; at most {most:,} are read")
        return value

    def keys(self, value: object, *, known: Collection[str], required: Collection[str]) -> None:
        """Refuse what is no object, lacks a required key or has one that is not known."""
        if not isinstance(value, dict):
            self.fail(f"must be an object, not {_shown(value)}")
        for key in value:
            if key not in known:
                self.fail(str(UnknownNameError("this object", key, known)))
        for key in required:
            if key not in value:
                self.fail(f"lacks {key!r}; it needs {', '.join(required)}")


def is_name(text: str) -> bool:
    r"""Tell whether a text can be shown as a name: short, and without control characters.

    >>> is_name("my ring"), is_name("\x1b[2J"), is_name("")
    (True, False, False)
    """
    return 0 < len(text) <= MAX_NAME and text.isprintable()


def read(path: str | os.PathLike[str], place: DocumentPath) -> bytes:
    """Return the bytes of an ordinary file of at most `MAX_BYTES`."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError) as error:  # a ValueError is a NUL in the path
        place.fail(f"can't be read: {getattr(error, 'strerror', None) or error}")
    if stat.S_ISDIR(status.st_mode):
        place.fail("is a folder; name a JSON file")
    if not stat.S_ISREG(status.st_mode):
        place.fail("is not an ordinary file")
    if status.st_size > MAX_BYTES:
        place.fail(f"has {status.st_size:,} bytes; at most {MAX_BYTES:,} are read")
    try:
        with Path(path).open("rb") as file:
            # One more than allowed, so that a file that grows meanwhile is refused, not cut.
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        place.fail(f"can't be read: {error.strerror or error}")


def parse(text: str | bytes, place: DocumentPath) -> object:
    """Return the value of a JSON text; refuse doubled keys, NaN, deep nesting and long numbers."""
    decoded = _decoded(text, place)
    if sum(map(decoded.count, "[{:,")) > MAX_TOKENS:
        place.fail(f"has more than {MAX_TOKENS:,} values")

    def without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            keys = [key for key, _ in pairs]
            double = next(key for key in fields if keys.count(key) > 1)
            place.fail(f"has an object with the key {_shown(double)} twice")
        return fields

    def whole(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            place.fail(f"has a number of {len(digits)} digits, {digits[:MAX_DIGITS]}…")
        return int(digits)

    def constant(name: str) -> NoReturn:
        place.fail(f"has {name}, which is no number in JSON")

    try:
        value: object = json.loads(
            decoded,
            object_pairs_hook=without_doubles,
            # Calling us for every number is slow; only a long run of digits makes it worth it.
            parse_int=whole if LONG_RUN.search(decoded) else None,
            parse_constant=constant,
        )
    except json.JSONDecodeError as error:
        where = place.inside(f"line {error.lineno}, column {error.colno}")
        where.fail(f"is not JSON: {error.msg}")
    except RecursionError:
        place.fail("is nested too deeply")
    return value


def _decoded(text: str | bytes, place: DocumentPath) -> str:
    if len(text) > MAX_BYTES:
        place.fail(f"is longer than {MAX_BYTES:,} bytes")
    if isinstance(text, str):
        return text.removeprefix("\ufeff")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place.fail(f"is not UTF-8: byte {error.start} is {text[error.start]:#04x}")


def _shown(value: object) -> str:
    """Show a value from a document: enough to recognise it, without control characters."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    # Cut before repr: a long text would be copied only to be thrown away.
    shown = repr(value[:SHOWN] if isinstance(value, str) else value)
    return shown if len(shown) <= SHOWN else shown[: SHOWN - 1] + "…"
