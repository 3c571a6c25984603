"""What callers pass, read once and alike everywhere: whole numbers, seconds, names, paths.

A whole number is whatever says so by `__index__`: numpy's integers, and tensors of one integer,
as well as Python's. Truth values and floats are none, though Python would let them pass.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from numbers import Real
from pathlib import Path

from roundelay.errors import InvalidArgumentError

__all__ = [
    "FOREVER_S",
    "config_folder",
    "index_of",
    "indices_of",
    "number",
    "path_of",
    "seconds",
    "shown",
    "truth",
    "whole",
]

FOREVER_S = 1e9  # a timeout that nobody lives to see, and that every clock can hold
NO_ORDER = (bytes, bytearray, Mapping, AbstractSet)  # or whose numbers stand for something else
SHOWN = 80  # characters of a value that a message repeats


def index_of(value: object) -> int | None:
    """Return the whole number that a value is; None if it is none.

    >>> index_of(3), index_of(True), index_of(3.0), index_of("3")
    (3, None, None, None)
    """
    if type(value) is int:
        return value
    # A tensor of one truth value has an `__index__` too.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type] # that is the question
    except (TypeError, ValueError, RuntimeError):
        return None


def indices_of(values: object) -> list[int] | None:
    """Return the whole numbers that an iterable has in order; None if it has others, or no order.

    >>> indices_of((1, 2)), indices_of([1, 2.0]), indices_of(3), indices_of({1, 2})
    ([1, 2], None, None, None)
    """
    if not isinstance(values, Iterable) or isinstance(values, NO_ORDER):
        return None
    try:
        numbers = [index_of(value) for value in values]
    except (TypeError, ValueError, RuntimeError):  # an array of no dimension is iterable in name
        return None
    found = [number for number in numbers if number is not None]
    return found if len(found) == len(numbers) else None


def whole(what: str, value: object, low: int, high: int | None = None) -> int:
    """Return a whole number within bounds, or say which those are.

    >>> whole("ranks", 0, 1, 1024)
    Traceback (most recent call last):
        ...
    roundelay.errors.InvalidArgumentError: ranks is a whole number from 1 to 1024, not 0.
    """
    number = index_of(value)
    if number is None or number < low or (high is not None and number > high):
        bounds = f"{low}" if high is None else f"{low} to {high}"
        raise InvalidArgumentError(f"{what} is a whole number from {bounds}, not {shown(value)}.")
    return number


def seconds(what: str, value: object) -> float:
    """Return a time to wait, in seconds, which may be infinite.

    >>> seconds("timeout", "soon")
    Traceback (most recent call last):
        ...
    roundelay.errors.InvalidArgumentError: timeout is a positive number of seconds, not 'soon'.
    """
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not value > 0:  # type: ignore[operator] # NaN is not above 0 either
        raise InvalidArgumentError(f"{what} is a positive number of seconds, not {shown(value)}.")
    try:
        return float(value)  # type: ignore[arg-type] # a real number
    except OverflowError:
        return math.inf


def number(what: str, value: object) -> float:
    """Return a number, Python's, numpy's or a tensor's; words and truth values are none.

    >>> number("weight", "3")
    Traceback (most recent call last):
        ...
    roundelay.errors.InvalidArgumentError: weight is a number, not '3'.
    """
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError  # noqa: TRY301 - as Python does for what is no number at all
        return float(value)  # type: ignore[arg-type] # that is the question
    except (TypeError, ValueError, RuntimeError):
        raise InvalidArgumentError(f"{what} is a number, not {shown(value)}.") from None
    except OverflowError:
        return math.inf


def truth(what: str, value: object) -> bool:
    """Return a truth value; 0 and 1 are such, words and other numbers are none.

    >>> truth("strict", "no")
    Traceback (most recent call last):
        ...
    roundelay.errors.InvalidArgumentError: strict is True or False, not 'no'.
    """
    known = isinstance(value, bool) or index_of(value) in (0, 1) or type(value).__name__ == "bool"
    if not known:
        raise InvalidArgumentError(f"{what} is True or False, not {shown(value)}.")
    return bool(value)


def path_of(what: str, value: object) -> Path:
    """Return the path that a value is; an empty one, which would be this folder, is none.

    >>> path_of("path of save", "")
    Traceback (most recent call last):
        ...
    roundelay.errors.InvalidArgumentError: path of save is the name of a folder or file, not ''.
    """
    try:
        name = os.fspath(value)  # type: ignore[call-overload] # that is the question
    except TypeError:
        name = None
    if not isinstance(name, str) or not name or "\0" in name:
        raise InvalidArgumentError(f"{what} is the name of a folder or file, not {shown(value)}.")
    return Path(name)


def config_folder(environment: Mapping[str, str]) -> Path:
    """Return where this user's settings lie: tuning tables, measured networks.

    >>> config_folder({"XDG_CONFIG_HOME": "/etc/own"}).as_posix()
    '/etc/own/roundelay'
    """
    base = environment.get("XDG_CONFIG_HOME", "")
    folder = Path(base) if Path(base).is_absolute() else Path("~/.config").expanduser()
    return folder / "roundelay"


def shown(value: object) -> str:
    """Return a value as a message repeats it: on one line, and no more of it than can be read.

    >>> shown("a" * 100)[-5:]
    'aaaa…'
    """
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN:
        return f"a number of {int(value.bit_length() * math.log10(2)) + 1} digits"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - what is shown may be broken in any way
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
