"""Every error a user can meet; each names the call, the value and the way out.

`except RoundelayError` catches all of them. The command line turns `InvalidArgumentError` and its
children into exit code 2 (wrong use) and every other one into exit code 1 (the work failed).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundelay.schedule import Failure

__all__ = [
    "InvalidArgumentError",
    "ProofError",
    "RoundelayError",
    "ScheduleError",
    "UnknownNameError",
    "UnsupportedSizeError",
]


class RoundelayError(Exception):
    """The root of all errors raised on purpose by Roundelay."""


class InvalidArgumentError(RoundelayError, ValueError):
    """A value that no engine or algorithm could take: a size below 1, a root out of range, …"""


class UnknownNameError(InvalidArgumentError):
    """A name that is not there, with the nearest one that is.

    >>> raise UnknownNameError("engines", "thread", ["reference", "threads"])
    Traceback (most recent call last):
        ...
    roundelay.errors.UnknownNameError: engines has no 'thread'. Did you mean 'threads'? Known: reference, threads.
    """

    def __init__(self, family: str, name: str, known: Iterable[str]) -> None:
        self.family, self.name, self.known = family, name, sorted(known)
        near = difflib.get_close_matches(name, self.known, n=1, cutoff=0.5)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        # A name may come from a stranger's file: show enough to recognise it, not all of it.
        shown = name if len(name) <= 60 else name[:57] + "…"
        super().__init__(f"{family} has no '{shown}'.{hint} Known: {', '.join(self.known)}.")


class UnsupportedSizeError(InvalidArgumentError):
    """A size that this algorithm truly can't take; the message names the sizes it takes."""

    def __init__(self, algorithm: str, size: int, takes: str) -> None:
        self.algorithm, self.size, self.takes = algorithm, size, takes
        super().__init__(f"{algorithm} does not run on {size} ranks; it takes {takes}.")


class ScheduleError(InvalidArgumentError):
    """A schedule that is not well formed: wrong types, ranks or chunks out of range, over a limit.

    `place` says where: `mine.json: transfers[3].dst`.
    """

    def __init__(self, place: str, problem: str) -> None:
        self.place, self.problem = place, problem
        super().__init__(f"{place}: {problem}")


class ProofError(RoundelayError):
    """A well-formed schedule or program that does not keep its contract; `failures` says where."""

    def __init__(self, what: str, failures: Iterable[Failure]) -> None:
        self.what, self.failures = what, tuple(failures)
        shown = [str(failure) for failure in self.failures[:5]]
        if len(self.failures) > len(shown):
            shown.append(f"… and {len(self.failures) - len(shown)} more")
        super().__init__("\n  ".join([f"{what} does not keep its contract:", *shown]))
