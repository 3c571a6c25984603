"""Phases of a training step, for a trace; where there is none, they cost one comparison."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, Protocol

from roundelay.records.events import KINDS

__all__ = ["NUMBERS", "Trace", "named", "phase"]

NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_NOTHING = nullcontext()
P = ParamSpec("P")


class Trace(Protocol):
    """What takes events down: the native core's `Trace`."""

    def string(self, text: str) -> int:
        """Return the number of a text."""

    def begin(self, kind: int, name: int = 0, number: int = 0, nbytes: int = 0) -> int:
        """Begin an event; return its number."""

    def begin_call(  # noqa: PLR0917 - the native core's
        self, group: int, call: int, collective: int, algorithm: int, dtype: int, op: int,
        count: int, nbytes: int, site: str,
    ) -> int:  # fmt: skip
        """Begin a call that the engine does not take down itself."""

    def end(self, number: int, failed: bool = False) -> None:  # noqa: FBT001, FBT002 - native
        """End it."""

    def name_next(self, name: int) -> None:
        """Say what the next call in the background is for."""

    def list_group(self, serial: int, rank: int, size: int) -> None:
        """Note a group that this rank is in."""


class _Phase:
    __slots__ = ("_begun", "_kind", "_name", "_number", "_trace")

    def __init__(self, trace: Trace, kind: int, name: str, number: int) -> None:
        self._trace, self._kind, self._name, self._number = trace, kind, name, number
        self._begun = 0

    def __enter__(self) -> None:
        name = self._trace.string(self._name) if self._name else 0
        self._begun = self._trace.begin(self._kind, name, self._number)

    def __exit__(self, kind: object, *_: object) -> None:
        self._trace.end(self._begun, kind is not None)


class _Named:
    __slots__ = ("_text", "_trace")

    def __init__(self, trace: Trace, text: str) -> None:
        self._trace, self._text = trace, text

    def __enter__(self) -> None:
        self._trace.name_next(self._trace.string(self._text))

    def __exit__(self, *_: object) -> None:
        self._trace.name_next(0)  # where nothing was started


def phase(
    trace: Trace | None, kind: str, name: str = "", *, number: int = 0
) -> AbstractContextManager[None]:
    """Return what is entered while a phase lasts; `number` is the step that it belongs to."""
    return _NOTHING if trace is None else _Phase(trace, NUMBERS[kind], name, number)


def named(
    trace: Trace | None, name: Callable[P, str], *args: P.args, **options: P.kwargs
) -> AbstractContextManager[None]:
    """Return what is entered while a call is started, to say what it is for: `name(*args)`."""
    return _NOTHING if trace is None else _Named(trace, name(*args, **options))
