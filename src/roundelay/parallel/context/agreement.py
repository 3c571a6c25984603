"""Ranks compare what they were asked for before they begin: one small exchange for each call."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.parallel.passes import label_of

__all__ = ["agree"]


def agree(
    call: str, comm: Communicator, alike: Mapping[str, Any], own: int, problem: str = ""
) -> list[int]:
    """Return what every rank has of `own`, once all else is alike; refuse on all ranks if not.

    Values that must be alike are numbers, truth values and short words. `problem` is what is wrong
    on this rank: who has none learns of it.
    """
    if comm.size == 1:
        if problem:
            raise InvalidArgumentError(problem)
        return [own]
    words = [_word(value) for value in alike.values()]
    mine = np.array([bool(problem), own, *words], np.int64)
    every = comm.all_gather(mine, label=label_of(call))
    if every[:, 0].any():
        _refuse(call, comm, problem)
    if (every[:, 2:] != mine[2:]).any():
        _tell_difference(call, comm, alike)
    return [int(theirs) for theirs in every[:, 1]]


def _refuse(call: str, comm: Communicator, problem: str) -> None:
    problems = comm.all_gather_object(problem)
    if problem:
        raise InvalidArgumentError(problem)
    rank = next(rank for rank, theirs in enumerate(problems) if theirs)
    raise CollectiveMismatch(f"{call} was refused on rank {rank}: {problems[rank]}")


def _tell_difference(call: str, comm: Communicator, alike: Mapping[str, Any]) -> None:
    """Have every rank name the first thing that differs, and who has what."""
    every = comm.all_gather_object({name: str(value) for name, value in alike.items()})
    for name in alike:
        said = [theirs[name] for theirs in every]
        other = next((rank for rank, theirs in enumerate(said) if theirs != said[0]), None)
        if other is not None:
            raise CollectiveMismatch(
                f"{call} needs the same {name} on every rank, but it is {said[0]} on rank 0 and "
                f"{said[other]} on rank {other}."
            )


def _word(value: Any) -> int:
    """Return a value as a number: itself, or what tells it from others."""
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return int(value) if isinstance(value, int) else crc32(str(value).encode())
