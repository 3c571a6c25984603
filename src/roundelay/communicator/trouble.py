"""From the shared record of what went wrong to an error that ends the search."""

from __future__ import annotations

import time
from typing import Protocol

from roundelay import _core
from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.communicator.buffers import DTYPES
from roundelay.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicationError,
    PeerLost,
)
from roundelay.reductions import REDUCTIONS

__all__ = ["explain", "say_slow"]


class Member(Protocol):
    """What an error must know of a communicator."""

    rank: int
    size: int
    timeout: float
    _ranks: list[int]  # in the world
    _world: _core.World
    _group: _core.Group | None
    _told: CommunicationError | None  # what went wrong, once somebody has asked


PATIENCE = 0.3  # seconds
LEFT = 2  # the native core's number for a rank that said goodbye


def explain(comm: Member) -> CommunicationError:
    """Return the error for the first trouble of this world, the same one each time."""
    if comm._world.foreign:
        return CommunicationError(
            "This process was forked from a rank and is none itself. Communicate in the parent, or "
            "start processes that make a communicator of their own."
        )
    if comm._told is None:
        comm._told = _explain(comm)
    return type(comm._told)(str(comm._told))


def _explain(comm: Member) -> CommunicationError:
    trouble = comm._world.trouble
    if trouble is None:
        return CommunicationError("The group is broken, but nobody said why.")
    kind, culprit, finder, at, call, text = trouble
    here = comm._group is not None and comm._group.at == at
    if here and kind == "mismatch":
        _let_all_come(comm, call)
    table = f"\n{_table(comm, call)}" if here and call else ""
    if kind == "mismatch":
        return CollectiveMismatch(f"The ranks made different calls:{table}")
    if kind == "lost" and text == "left":
        return PeerLost(f"Rank {culprit} has finished, but rank {finder} still needs it.{table}")
    if kind == "lost":
        pid = comm._world.pid(culprit)
        return PeerLost(f"Rank {culprit} (process {pid}) died.{_last_call(comm, culprit)}")
    if kind == "timeout" and culprit == finder:
        return CollectiveTimeout(
            f"Rank {finder} waited {comm.timeout:g} s for a message from any rank, and none came."
        )
    if kind == "timeout":
        return CollectiveTimeout(
            f"Rank {finder} waited {comm.timeout:g} s for rank {culprit}, which is "
            f"{_state(comm, culprit)}.{table}"
        )
    if kind == "failed":
        return PeerLost(f"Rank {culprit} failed: {text}")
    return CommunicationError(f"Rank {culprit} was interrupted.")


def say_slow(comm: Member, rank: int, seconds: float) -> str:
    """Return the warning that a rank lets others wait."""
    name = f"rank {comm._ranks[rank]}" if rank >= 0 else "any rank"
    state = f", which is {_state(comm, comm._ranks[rank])}" if rank >= 0 else ""
    mine = comm._group.record(comm.rank, 0) if comm._group is not None else None
    what = f" in {_describe(mine)}" if mine and mine[0] else ""
    return (
        f"roundelay: rank {comm._ranks[comm.rank]} has waited {seconds:.0f} s for {name}{state}"
        f"{what}; it gives up after {comm.timeout:g} s."
    )


def _let_all_come(comm: Member, call: int) -> None:
    """Give ranks that are on their way a moment to show what they call."""
    group, limit = comm._group, time.monotonic() + PATIENCE
    while group is not None and time.monotonic() < limit:
        if all(group.record(rank, 0)[0] >= call for rank in range(comm.size)):
            return
        time.sleep(0.002)


def _table(comm: Member, call: int) -> str:
    """List who called what, where; one line for all ranks that did the same."""
    group = comm._group
    if group is None:
        return ""
    seen: dict[str, list[int]] = {}
    for rank in range(comm.size):
        record = group.record(rank, call)
        latest = group.record(rank, 0)
        if record[0] == call:
            line = _describe(record)
        elif latest[0] == 0:
            line = "has made no call yet"
        else:
            line = f"not there; its last call was {_describe(latest)}"
        seen.setdefault(line, []).append(comm._ranks[rank])
    return "\n".join(f"  {_ranks(ranks)}: {line}" for line, ranks in seen.items())


def _ranks(ranks: list[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"


def _describe(record: tuple[int, int, int, int, int, int, int, str]) -> str:
    call, collective, algorithm, dtype, op, count, root, site = record
    made = collectives.load(collectives.names()[collective])
    details = f" {DTYPES[dtype]}[{count}]" if made.name != "barrier" else ""
    if made.reduces and made.name != "barrier":
        details += f" op={list(REDUCTIONS)[op]}"
    if made.rooted:
        details += f" root={root}"
    short = algorithms.load(algorithms.names()[algorithm]).short_name
    where = f" at {site}" if site else ""
    return f"{made.name} #{call}{details} ({short}){where}"


def _last_call(comm: Member, culprit: int) -> str:
    if culprit not in comm._ranks or comm._group is None:
        return ""
    latest = comm._group.record(comm._ranks.index(culprit), 0)
    return f" Its last call was {_describe(latest)}." if latest[0] else " It had made no call yet."


def _state(comm: Member, rank: int) -> str:
    """Tell a stopped process from a busy one by its heartbeat."""
    world = comm._world
    if world.life(rank) == LEFT:
        return "gone: it said goodbye"
    before = world.heartbeat(rank)
    time.sleep(0.35)
    if before and world.heartbeat(rank) == before:
        return f"stopped (process {world.pid(rank)} does not run)"
    return "alive but elsewhere" + _last_call(comm, rank).rstrip(".").lower().replace(
        " its last", ": its last"
    ).replace(" it had", ": it had")
