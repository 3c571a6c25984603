"""A rank that mpirun started: walks schedules over MPI for a program that is not one itself.

Started as `python -m roundelay.engines.mpi._rank SOCKET`. Requests and answers go through the
socket; data between ranks goes through MPI.
"""

from __future__ import annotations

import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from roundelay.engines._base import CollectiveCall, ScheduleFor
from roundelay.engines._over_messages import Fold, RankSchedule, native_fold
from roundelay.engines.mpi.engine import MpiEngine, mpi_engine
from roundelay.errors import InvalidArgumentError
from roundelay.processes.channel import Channel
from roundelay.processes.wire import decode, encode
from roundelay.reductions import Array
from roundelay.schedule import Schedule, from_json

__all__ = ["DONE", "FAILED", "FOLD", "Failure", "WalkRequest"]

DONE, FAILED, FOLD = b"+", b"-", b"?"  # how an answer begins
TIMEOUT_S = 60.0


class WalkRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a rank is to do."""

    schedule: str  # as JSON; empty for the one of the request before
    given: bytes  # an encoded array; an empty one tells the dtype to those who bring nothing
    brings: bool
    op: str
    own: bool  # the program has the function: ask it to fold
    counts: list[int]


_read = msgspec.msgpack.Decoder(WalkRequest).decode


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """How a rank failed, in its own words."""

    kind: str
    message: str
    traceback: str


read_failure = msgspec.msgpack.Decoder(Failure).decode


def main(address: str) -> None:
    """Be a rank until there are no more requests."""
    engine = mpi_engine(_no_jobs, TIMEOUT_S)
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    channel = Channel(line.detach())
    channel.send(str(engine.rank).encode())
    route: RankSchedule | None = None
    while request := channel.receive():
        try:
            asked = _read(request)
            if asked.schedule:
                route = RankSchedule.of(from_json(asked.schedule), engine.rank)
            channel.send(DONE + encode(_answer(engine, channel, route, asked)))
        except Exception as error:  # noqa: BLE001 - the program raises it
            told = Failure(type(error).__name__, str(error), traceback.format_exc())
            channel.send(FAILED + msgspec.msgpack.encode(told))
    engine.close()
    channel.close()


def _answer(
    engine: MpiEngine, channel: Channel, route: RankSchedule | None, asked: WalkRequest
) -> Array | None:
    if route is None:
        raise InvalidArgumentError("A request came without a schedule.")
    array: Array = decode(asked.given)
    value: np.dtype[Any] = array.dtype if array.dtype.names is None else array.dtype["value"]
    fold = _asking(channel) if asked.own else native_fold(asked.op, value.name, engine.size)
    given = array if asked.brings else None
    if route.schedule.collective.idempotent and given is None:
        # Ranks of a barrier bring nothing, and must be heard of all the same.
        _barrier(engine, route, fold)
        return np.empty(0, array.dtype)
    due = engine.walk(route, given, array.dtype, asked.counts, fold)
    return np.concatenate(due) if due else None


def _barrier(engine: MpiEngine, route: RankSchedule, fold: Fold) -> None:
    blocks = route.schedule.collective.blocks(engine.size)
    nothing = np.zeros(blocks, np.uint8)
    engine.walk(route, nothing, nothing.dtype, [1] * blocks, fold)


def _asking(channel: Channel) -> Fold:
    """Return a fold by a function that only the program has."""

    def fold(operands: Sequence[Array], _: bool) -> Array:  # noqa: FBT001 - a fold's form
        channel.send(FOLD + encode(list(operands)))
        answer = channel.receive()
        if answer is None:
            raise SystemExit(1)  # the program has ended
        made: Array = decode(answer)
        return made

    return fold


def _no_jobs(_: int) -> ScheduleFor:
    def refuse(call: CollectiveCall, _: str | None) -> Schedule:
        raise InvalidArgumentError(f"This rank walks schedules, but was given a {call.collective}.")

    return refuse


if __name__ == "__main__":
    main(sys.argv[1])
