"""A family is a folder: every public file in it is a member, found by listing, loaded by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from typing import Generic, TypeVar

from roundelay.errors import UnknownNameError

__all__ = ["Family", "class_name"]

Member = TypeVar("Member")


def class_name(name: str) -> str:
    """Return what a class is called whose file is called so, for families of classes.

    >>> class_name("shared_memory")
    'SharedMemory'
    """
    return "".join(word.capitalize() for word in name.split("_"))


class Family(Generic[Member]):
    """The members of a package: one file each, one public name each, after the file's.

    Adding a member is adding a file. Files that start with an underscore are private helpers.

    >>> from roundelay.collectives import collectives
    >>> collectives.names()[:3]
    ['all_gather', 'all_reduce', 'all_to_all']
    >>> collectives.load("all_reduce").name
    'all_reduce'
    """

    def __init__(self, package: str, *, public: Callable[[str], str] = str) -> None:
        self.package = package
        self._public = public  # from a file's name to its member's: engines are classes
        self.label = package.rpartition(".")[2]
        self._load = cache(self._load_member)

    def names(self) -> list[str]:
        """Return the file names of the members, sorted."""
        path = importlib.import_module(self.package).__path__
        return sorted(info.name for info in pkgutil.iter_modules(path) if info.name[0] != "_")

    def load(self, name: str) -> Member:
        """Return the member called `name`; an unknown name is an error with the nearest known."""
        return self._load(name)

    def _load_member(self, name: str) -> Member:
        known = self.names()
        if name not in known:
            raise UnknownNameError(self.label, name, known)
        module = importlib.import_module(f"{self.package}.{name}")
        member: Member = getattr(module, self._public(name))
        return member

    def __iter__(self) -> Iterator[Member]:
        return (self.load(name) for name in self.names())
