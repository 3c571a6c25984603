"""Ring directions: every ring is written once, sending right, and mirrored to send left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from roundelay.errors import UnknownNameError
from roundelay.schedule import Transfer, relabel

Direction = Literal["right", "left"]


def turned(transfers: Iterable[Transfer], size: int, direction: Direction) -> Iterable[Transfer]:
    """Return the ring as it is, or its mirror image: rank and chunk x become -x."""
    if direction not in get_args(Direction):
        raise UnknownNameError("directions", str(direction), get_args(Direction))
    if direction == "right":
        return transfers
    mirror = [-rank % size for rank in range(size)]
    return relabel(transfers, ranks=mirror, chunks=lambda chunk: mirror[chunk])
