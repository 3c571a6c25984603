"""What a request asks for: parameters, checked one by one; what nobody reads is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from typing import TypeVar

from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.view.languages import LANGUAGES, Language
from roundelay.web.run_index import RunIndex

__all__ = ["Query"]

Name = TypeVar("Name", bound=str)

#: The most characters of a value that an error shows.
SHOWN = 40
WHOLE = re.compile(r"-?[0-9]{1,18}")
NUMBER = re.compile(r"-?[0-9]{1,40}(\.[0-9]{0,40})?(e[+-]?[0-9]{1,3})?", re.IGNORECASE)


class Query:
    """The parameters of one request.

    >>> query = Query([("ranks", "5"), ("network", "ring")])
    >>> query.whole("ranks", 4, low=1, high=64), query.choice("network", ["ring", "switch"])
    (5, 'ring')
    >>> query.finish()
    >>> Query([("what", "5")]).finish()
    Traceback (most recent call last):
        ...
    roundelay.errors.UnknownNameError: this question has no 'what'. Known: lang.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, str]] = (), *, runs: RunIndex | None = None
    ) -> None:
        self.runs = runs  # recorded runs, of a folder that the user named
        self._given: dict[str, str] = {}
        for name, value in parameters:
            if name in self._given:
                raise InvalidArgumentError(f"{_shown(name)} is there twice. Give it once.")
            self._given[name] = value
        self._asked = {"lang"}

    @property
    def language(self) -> Language:
        """The language to answer in."""
        return self.choice("lang", LANGUAGES)

    def whole(self, name: str, default: int, *, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`."""
        text = self._text(name)
        if text is None:
            return default
        if not WHOLE.fullmatch(text) or not low <= int(text) <= high:
            raise InvalidArgumentError(
                f"{name} is a whole number from {low} to {high}, not {_shown(text)}."
            )
        return int(text)

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        """Return a number from `low` to `high`."""
        text = self._text(name)
        if text is None:
            return default
        value = float(text) if NUMBER.fullmatch(text) else math.nan
        if not low <= value <= high:  # nor is NaN
            raise InvalidArgumentError(
                f"{name} is a number from {low:g} to {high:g}, not {_shown(text)}."
            )
        return value

    def choice(self, name: str, known: Collection[Name], default: Name | None = None) -> Name:
        """Return one of the names that are known; without a default, the first is it."""
        text = self._text(name)
        if text is None:
            return next(iter(known)) if default is None else default
        for each in known:
            if each == text:
                return each
        raise UnknownNameError(name, text, known)

    def text(self, name: str, default: str = "", *, most: int = 200) -> str:
        """Return a text of at most `most` printable characters."""
        text = self._text(name)
        if text is None:
            return default
        if len(text) > most or not text.isprintable():
            raise InvalidArgumentError(
                f"{name} takes up to {most} printable characters, not {_shown(text)}."
            )
        return text

    def finish(self) -> None:
        """Refuse a parameter that nobody has asked for, and a language that nobody speaks."""
        _ = self.language
        for name in self._given.keys() - self._asked:
            raise UnknownNameError("this question", name, self._asked)

    def _text(self, name: str) -> str | None:
        self._asked.add(name)
        return self._given.get(name)


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")
