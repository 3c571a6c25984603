"""Hooks on modules that belong to one rank's model, and to no copy of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ModuleHook:
    """A hook that stays behind when its module is copied or pickled: the copy is not prepared."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Do what it is there for."""
        return self._function(*args, **options)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _in_copies, ()


def _in_copies() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand in a copy for a hook that was left behind."""
