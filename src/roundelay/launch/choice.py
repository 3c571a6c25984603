"""From the name of an engine to what starts or joins its ranks."""

from __future__ import annotations

from typing import Literal

from roundelay.engines import Harness, engines
from roundelay.errors import InvalidArgumentError, UnknownNameError

__all__ = ["engine_called"]


def engine_called(name: object, to: Literal["start", "join"]) -> type[Harness]:
    """Return an engine that starts ranks, or joins them; refuse any other by name."""
    known = [each for each in engines.names() if engines.load(each).can(to)]
    if isinstance(name, str) and name in known:
        return engines.load(name)
    if not isinstance(name, str) or name not in engines.names():
        raise UnknownNameError("engines", str(name), known)
    if to == "start":
        raise InvalidArgumentError(
            f"The engine {name} starts no ranks; run takes {' or '.join(known)}."
        )
    raise InvalidArgumentError(
        f"init joins processes that a launcher started, with one of the engines "
        f"{', '.join(known)}; for {name} see rd.run."
    )
