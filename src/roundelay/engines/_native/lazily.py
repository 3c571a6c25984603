"""Attributes that are made when somebody first needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Lazily(Generic[T]):
    """Decorates a method that makes an attribute: all who ask get one, several threads at once too.

    >>> class Rank:
    ...     @Lazily
    ...     def sent(self) -> list[int]:
    ...         return []
    >>> rank = Rank()
    >>> rank.sent.append(3)
    >>> rank.sent
    [3]
    """

    def __init__(self, make: Callable[[Any], T]) -> None:  # Any: of whatever class it stands in
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        """Learn the name of the attribute, by which it is found without us from then on."""
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> T:
        """Make the attribute, unless another thread was quicker."""
        attribute: T = vars(instance).setdefault(self._name, self._make(instance))
        return attribute
