"""From the shared record of what went wrong to an error that ends the search."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.communicator.buffers import DTYPES
from roundelay.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicationError,
    InvalidArgumentError,
    PeerLost,
)
from roundelay.reductions import REDUCTIONS

if TYPE_CHECKING:
    from roundelay import _core
    from roundelay.communicator.native import NativeEnd

__all__ = ["cancelled", "explain", "own_doing", "refuse_nested", "say_slow"]


PATIENCE = 1.0  # seconds, for ranks that are on their way, and perhaps still compile
BEAT = 0.5  # seconds without a heartbeat that mean a stopped process
GONE = {"left": "finished", "closed": "closed the group"}
LATE = 2  # the native core's number for a letter that did not come in time
LEFT = 2  # the native core's number for a rank that said goodbye


def explain(end: NativeEnd) -> CommunicationError:
    """Return the error for the first trouble of this world, the same one each time."""
    if end.world.foreign:
        return CommunicationError(
            "This process was forked from a rank and is none itself. Communicate in the parent, or "
            "start processes that make a communicator of their own."
        )
    end._root.heard = True
    if end.told is None:
        end.told = _explain(end)
    return type(end.told)(str(end.told))


def _explain(end: NativeEnd) -> CommunicationError:
    trouble = end.world.trouble
    if trouble is None:
        return CommunicationError("The group is broken, but nobody said why.")
    kind, culprit, finder, at, call, text = trouble
    here = end.native is not None and end.native.at == at
    if here and kind == "mismatch":
        _let_all_come(end, call)
    table = f"\n{_table(end, call)}" if here and call else ""
    if kind == "mismatch":
        return CollectiveMismatch(f"The ranks made different calls:{table}")
    if kind == "lost" and text in GONE:
        how = GONE[text]
        return PeerLost(f"Rank {culprit} has {how}, but rank {finder} still needs it.{table}")
    if kind == "lost":
        pid = end.world.pid(culprit)
        return PeerLost(f"Rank {culprit} (process {pid}) died.{_last_call(end, culprit)}")
    if kind == "timeout" and culprit == finder:
        return CollectiveTimeout(
            f"Rank {finder} waited {end.timeout:g} s for a message from any rank, and none came."
        )
    if kind == "timeout":
        # As the one who waited found it: a rank that goes on later is no witness of its own stop.
        state = _stopped_or_busy(end, culprit, stopped=text == "stopped")
        return CollectiveTimeout(
            f"Rank {finder} waited {end.timeout:g} s for rank {culprit}, which is {state}.{table}"
        )
    if kind == "failed":
        return PeerLost(f"Rank {culprit} failed: {text}")
    return CommunicationError(f"Rank {culprit} was interrupted.")


def own_doing(end: NativeEnd) -> bool:
    """Tell whether this very rank ended the world, by an error that is already on its way."""
    trouble = end.world.trouble
    mine = end.ranks[end.rank]
    return trouble is not None and trouble[0] in ("failed", "interrupted") and trouble[1] == mine


def cancelled(end: NativeEnd, letter: _core.Letter) -> CommunicationError:
    """Return the error of a receive that nothing had come for when its communicator was closed."""
    source = letter.found[0]
    name = f"rank {end.ranks.index(source)}" if source in end.ranks else "any rank"
    call = f"recv on rank {end.rank} from {name}"
    if letter.fate == LATE:
        return CollectiveTimeout(
            f"{call}: nothing had come {end.timeout:g} s after the communicator was closed."
        )
    return PeerLost(f"{call}: the communicator was closed, and nobody was left to send anything.")


def refuse_nested(inner: int | str, inner_site: str, outer: int | str, outer_site: str) -> None:
    """Refuse a call that would wait for the one in whose middle its thread is."""
    raise InvalidArgumentError(
        f"{_named(inner, inner_site)} was called in the middle of {_named(outer, outer_site)}, on "
        f"the same thread, and could not return before it: by a signal handler or a finalizer. Let "
        f"it make a note, and communicate when {_named(outer, '')} has returned."
    )


def _named(call: int | str, site: str) -> str:
    name = call if isinstance(call, str) else collectives.names()[call]
    return f"{name} at {site}" if site else name


def say_slow(end: NativeEnd, rank: int, seconds: float) -> str:
    """Return the warning that a rank lets others wait."""
    name = f"rank {end.ranks[rank]}" if rank >= 0 else "any rank"
    state = f", which is {_state(end, end.ranks[rank])}" if rank >= 0 else ""
    mine = end.native.record(end.rank, 0) if end.native is not None else None
    what = f" in {_describe(mine)}" if mine and mine[0] else ""
    return (
        f"roundelay: rank {end.ranks[end.rank]} has waited {seconds:.0f} s for {name}{state}"
        f"{what}; it gives up after {end.timeout:g} s."
    )


def _let_all_come(end: NativeEnd, call: int) -> None:
    """Give ranks that are on their way a moment to show what they call."""
    group, limit = end.native, time.monotonic() + PATIENCE
    while group is not None and time.monotonic() < limit:
        if all(group.record(rank, 0)[0] >= call for rank in range(end.size)):
            return
        time.sleep(0.002)


def _table(end: NativeEnd, call: int) -> str:
    """List who called what, where; one line for all ranks that did the same."""
    group = end.native
    if group is None:
        return ""
    seen: dict[str, list[int]] = {}
    for rank in range(end.size):
        record = group.record(rank, call)
        latest = group.record(rank, 0)
        if record[0] == call:
            line = _describe(record)
        elif latest[0] == 0:
            line = "has made no call yet"
        else:
            line = f"not there; its last call was {_describe(latest)}"
        seen.setdefault(line, []).append(end.ranks[rank])
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
    elif root:
        details += f" label={root}"
    short = algorithms.load(algorithms.names()[algorithm]).short_name
    where = f" at {site}" if site else ""
    return f"{made.name} #{call}{details} ({short}){where}"


def _last_call(end: NativeEnd, culprit: int) -> str:
    if culprit not in end.ranks or end.native is None:
        return ""
    latest = end.native.record(end.ranks.index(culprit), 0)
    return f" Its last call was {_describe(latest)}." if latest[0] else " It had made no call yet."


def _state(end: NativeEnd, rank: int) -> str:
    """Tell a stopped process from a busy one by its heartbeat."""
    world = end.world
    before, limit = world.heartbeat(rank), time.monotonic() + BEAT
    while before and world.heartbeat(rank) == before and time.monotonic() < limit:
        time.sleep(0.02)
    if world.life(rank) == LEFT:
        return "gone: it said goodbye"
    return _stopped_or_busy(end, rank, stopped=bool(before) and world.heartbeat(rank) == before)


def _stopped_or_busy(end: NativeEnd, rank: int, *, stopped: bool) -> str:
    if stopped:
        return f"stopped (process {end.world.pid(rank)} does not run)"
    return "alive but elsewhere" + _last_call(end, rank).rstrip(".").lower().replace(
        " its last", ": its last"
    ).replace(" it had", ": it had")
