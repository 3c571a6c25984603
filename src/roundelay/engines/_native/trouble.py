"""From the shared record of what went wrong to an error that ends the search."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from roundelay import _core
from roundelay.collectives import collectives
from roundelay.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicationError,
    InvalidArgumentError,
    PeerLost,
    ranks_text,
)
from roundelay.live.world_report import WorldReport
from roundelay.processes.death import step_of

if TYPE_CHECKING:
    from roundelay.engines._native.engine import NativeEngine


PATIENT = 86400.0  # seconds; a longer timeout says that waiting is all there is to do
PATIENCE = 1.0  # seconds, for ranks that are on their way, and perhaps still compile
BEAT = 0.5  # seconds without a heartbeat that mean a stopped process
GONE = {"left": "finished", "closed": "closed the group"}
LATE = 2  # the native core's number for a letter that did not come in time


def explain(engine: NativeEngine) -> CommunicationError:
    """Return the error for the first trouble of this world, the same one each time."""
    if engine.world.foreign:
        return CommunicationError(
            "This process was forked from a rank and is none itself. Communicate in the parent, or "
            "start processes that make a communicator of their own."
        )
    root = engine._root
    root.heard = True
    if root.told is None:
        root.told = _explain(engine)
    return type(root.told)(str(root.told))


def _explain(engine: NativeEngine) -> CommunicationError:
    world = engine.world
    if world.trouble is None:
        return CommunicationError("The group is broken, but nobody said why.")
    kind, culprit, finder, at, call, text = world.trouble
    if kind == "mismatch" or (kind == "lost" and text in GONE):
        table = _calls(engine, at, call) if call else f":\n{_waits(engine, at, call)}"
        if kind == "mismatch" and call and table.count("\n") == 1:
            table += "\nThey look alike: they differ in counts=, which must be one list on all."
        if kind == "mismatch" or culprit == engine.ranks[engine.rank]:
            return CollectiveMismatch(f"The ranks made different calls{table}")
        how = GONE[text]
        return PeerLost(f"Rank {culprit} has {how}, but rank {finder} still needs it{table}")
    if kind == "lost" and text == "unreadable":
        return PeerLost(
            f"Rank {finder} can't read the memory of rank {culprit} (process "
            f"{world.pid(culprit)}): it was given back during the call, or the kernel lets nobody "
            f"read it. Keep buffers until a call has ended, or set ROUNDELAY_PEER_MEMORY=0, and "
            f"ranks copy by shared memory alone."
        )
    if kind == "lost":
        report = _report(engine)
        last = report.last(report.last_of(engine.at, culprit))
        return PeerLost(f"{told_lost(world, culprit)} {last[0].upper()}{last[1:]}.")
    if kind == "timeout":
        whom = _whom(world, finder, culprit, world.stood_still)
        return CollectiveTimeout(
            f"Rank {finder} waited {text} s for {whom}. What the ranks were doing:\n"
            f"{_waits(engine, at, call)}{_report(engine).circle()}"
        )
    if kind == "failed":
        return PeerLost(f"Rank {culprit} failed{_step(world, culprit)}: {text}")
    return CommunicationError(f"Rank {culprit} was interrupted.")


def told_lost(world: _core.World, rank: int) -> str:
    """Say who was lost, in which step of its training, and why."""
    step, why = _step(world, rank), world.why(rank)
    if why:
        return f"Rank {rank} failed{step}: {why.rstrip('.')}."
    return f"Rank {rank} (process {world.pid(rank)}) died{step}."


def _step(world: _core.World, rank: int) -> str:
    step = step_of(world, rank)
    return "" if step is None else f" in step {step}"


def own_doing(engine: NativeEngine) -> bool:
    """Tell whether this very rank ended the world, by an error that is already on its way."""
    trouble = engine.world.trouble
    mine = engine.ranks[engine.rank]
    return trouble is not None and trouble[0] in ("failed", "interrupted") and trouble[1] == mine


def cancelled(engine: NativeEngine, request: _core.MessageRequest) -> CommunicationError:
    """Return the error of a receive that nothing had come for when its communicator was closed."""
    source = request.status[0]
    name = f"rank {engine.ranks.index(source)}" if source in engine.ranks else "any rank"
    call = f"recv on rank {engine.rank} from {name}"
    if request.fate == LATE:
        return CollectiveTimeout(
            f"{call}: nothing had come {engine.timeout:g} s after the communicator was closed."
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


def warn_slow(engine: NativeEngine, rank: int, seconds: float) -> None:
    """Warn that a rank lets others wait, unless something has gone wrong: that is told anyhow."""
    me = engine.ranks[engine.rank]
    whom = "any rank"
    if rank >= 0:
        whom = _whom(engine.world, me, engine.ranks[rank], partial(_is_stopped, engine.world))
    what = "; ".join(_report(engine).of_rank(engine.at, 0, me))
    if engine.world.trouble is None:
        sys.stderr.write(
            f"roundelay: rank {me} has waited {seconds:.0f} s for {whom}; it gives up after "
            f"{engine.timeout:g} s. It is in {what}.\n"
        )


def warn_stopped(engine: NativeEngine, rank: int, seconds: float) -> None:
    """Warn, where this rank has ended, of one that can't; who only takes long is let be."""
    me, other, world = engine.ranks[engine.rank], engine.ranks[rank], engine.world
    if _is_stopped(world, other) and world.trouble is None:
        sys.stderr.write(
            f"roundelay: rank {me} has ended, and waited {seconds:.0f} s for the end of rank "
            f"{other}, which is stopped (process {world.pid(other)} does not run). To continue "
            f"it: kill -CONT {world.pid(other)}\n"
        )


def slow_message(engine: NativeEngine, world_rank: int, seconds: float) -> None:
    """Warn that a message does not come; who waits for ever is not surprised."""
    if engine.timeout > PATIENT:
        return
    rank = engine.ranks.index(world_rank) if world_rank in engine.ranks else -1
    if engine.tells_slow or (rank >= 0 and _is_stopped(engine.world, world_rank)):
        warn_slow(engine, rank, seconds)


def _report(engine: NativeEngine) -> WorldReport:
    return WorldReport(engine.world, engine.selector.algorithms)


def _calls(engine: NativeEngine, at: int, call: int) -> str:
    """Say in which group, and list who called what there, where; one line for all that agree."""
    world, report = engine.world, _report(engine)
    _let_all_come(world, at, call)
    seen: dict[str, list[int]] = {}
    for rank, record, latest in world.calls(at, call)[2]:
        line = report.call(record)
        if record[0] != call:
            line = f"not there; {report.last(latest)}" if latest[0] else "has made no call yet"
        seen.setdefault(line, []).append(rank)
    return f"{report.group(at)}:\n{_lines(seen)}"


def _let_all_come(world: _core.World, at: int, call: int) -> None:
    """Give ranks that are on their way a moment to show what they call."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        if all(latest[0] >= call for _, _, latest in world.calls(at, call)[2]):
            return
        time.sleep(0.002)


def _waits(engine: NativeEngine, at: int, call: int) -> str:
    """List what every rank was doing when it went wrong; one line for all that did the same."""
    report = _report(engine)
    seen: dict[str, list[int]] = {}
    for rank in range(engine.world.size):
        for line in dict.fromkeys(report.of_rank(at, call, rank)):
            seen.setdefault(line, []).append(rank)
    return _lines(seen)


def _lines(seen: dict[str, list[int]]) -> str:
    return "\n".join(f"  {ranks_text(ranks)}: {line}" for line, ranks in seen.items())


def _whom(world: _core.World, me: int, other: int, stopped: Callable[[int], bool]) -> str:
    """Say for whom a rank waits, and what is known of that one, and of whom that waits for."""
    if other == me:
        sources = {wait[3] for wait in world.waits(me)}
        return "a message from itself" if me in sources else "a message from any rank"
    if stopped(other):
        return f"rank {other}, {_not_running(world, other)}"
    if not world.waits(other):
        return f"rank {other}, which is running but has not entered this call"
    whom, last = f"rank {other}, which waits itself", _last_of_chain(world, other, stopped)
    if last is None:
        return whom
    known = _not_running(world, last) if stopped(last) else "which is running and waits for nobody"
    return f"{whom}, in the end for rank {last}, {known}"


def _not_running(world: _core.World, rank: int) -> str:
    return f"which is stopped (process {world.pid(rank)} does not run)"


def _last_of_chain(world: _core.World, start: int, stopped: Callable[[int], bool]) -> int | None:
    """Return for whom a rank waits in the end; None where that is itself, any rank, or a circle.

    A stopped rank is an end: what it waited for may have come.
    """
    seen = [start]
    while waits := world.waits(seen[-1]):
        after = waits[0][3]
        if after < 0 or after in seen:
            return None
        if stopped(after):
            return after
        seen.append(after)
    return seen[-1] if len(seen) > 1 else None


def _is_stopped(world: _core.World, rank: int) -> bool:
    """Tell a stopped process from a busy one by its heartbeat."""
    before, limit = world.heartbeat(rank), time.monotonic() + BEAT
    if time.monotonic_ns() - before < BEAT * 1e9:
        return False  # it runs, and nobody has to look on
    while before and world.heartbeat(rank) == before and time.monotonic() < limit:
        if world.trouble is not None:  # who has ended for that has no heartbeat either
            return False
        time.sleep(0.02)
    return bool(before) and world.heartbeat(rank) == before


def tell_slow(engine: weakref.ref[NativeEngine], rank: int, seconds: float) -> None:
    """Warn, as long as the engine is there."""
    if (alive := engine()) is not None:
        warn_slow(alive, rank, seconds)


def tell_broken(engine: weakref.ref[NativeEngine]) -> None:
    """Raise what went wrong, as long as the engine is there."""
    if (alive := engine()) is not None:
        raise explain(alive) from None
