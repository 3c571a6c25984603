"""What makes a function an algorithm: it says which contract it keeps and how it cuts blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from roundelay.collectives import Collective
from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.schedule import Schedule, Transfer

#: A whole number, or a function of the algorithm's own arguments.
Parts = int | Callable[..., int]


class Algorithm:
    """A function from size (and root, and options) to transfers, with the contract it keeps.

    Call it for the transfers, to compose them into another algorithm; ask it for a `schedule` to
    prove, price, draw, compile or run.
    """

    def __init__(
        self, function: Callable[..., Iterable[Transfer]], collective: Collective, parts: Parts
    ) -> None:
        self.function = function
        self.collective = collective
        self.name = function.__name__
        self.__doc__ = function.__doc__
        self.__name__, self.__module__ = function.__name__, function.__module__
        self.__wrapped__ = function  # so that doctest and inspect look at the function itself
        self._parts = parts
        self._signature = inspect.signature(function)

    def __repr__(self) -> str:
        return f"<algorithm {self.name}>"

    @property
    def short_name(self) -> str:
        """The name without its collective: `ring` of `all_reduce_ring`."""
        return self.name.removeprefix(f"{self.collective.name}_")

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def options(self) -> Mapping[str, Any]:  # defaults are of any type
        """The names and defaults of the options, beyond size and root."""
        return {
            name: parameter.default
            for name, parameter in self._signature.parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }

    def __call__(self, size: int, root: int = 0, **options: Any) -> Iterable[Transfer]:
        """Return the transfers on `size` ranks; `root` counts for rooted collectives only."""
        size, root = self.collective.check(size, root)
        unknown = options.keys() - self.options.keys()
        if unknown:
            known = self.options or {"no options": None}
            raise UnknownNameError(f"options of {self.name}", min(unknown), known)
        arguments = (size, root) if "root" in self._signature.parameters else (size,)
        return self.function(*arguments, **options)

    def schedule(self, size: int, root: int = 0, **options: Any) -> Schedule:
        """Return the schedule on `size` ranks.

        >>> from roundelay.algorithms import algorithms
        >>> ring = algorithms.load("all_reduce_ring").schedule(4)
        >>> len(ring.steps), ring.parts
        (6, 4)
        """
        size, root = self.collective.check(size, root)
        transfers = self(size, root, **options)
        parts = self._parts
        if not isinstance(parts, int):
            parts = parts(size=size, **{**self.options, **options})
        return Schedule(self.collective, size, transfers, root=root, parts=parts, name=self.name)


def implements(
    collective: Collective, *, parts: Parts = 1
) -> Callable[[Callable[..., Iterable[Transfer]]], Algorithm]:
    """Mark a function as an algorithm for `collective` that cuts every block into `parts`."""

    def decorate(function: Callable[..., Iterable[Transfer]]) -> Algorithm:
        if not function.__name__.startswith(f"{collective.name}_"):
            raise InvalidArgumentError(
                f"{function.__name__} implements {collective.name}, so it must be called "
                f"{collective.name}_<algorithm>, as must its file."
            )
        return Algorithm(function, collective, parts)

    return decorate
