"""`rd.run`: a function on every rank, as threads or as processes, from inside a program."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

from roundelay import _core
from roundelay.arguments import seconds as read_seconds
from roundelay.arguments import shown, whole
from roundelay.communicator import Communicator
from roundelay.communicator.selection import Selection
from roundelay.communicator.tracing import found_trace, start_trace
from roundelay.engines import Engine, engines
from roundelay.engines.shared_memory import SharedMemory
from roundelay.errors import InvalidArgumentError, RankFailed, UnknownNameError, UnsendableError
from roundelay.processes.death import ServerFinished
from roundelay.processes.reports import as_raised
from roundelay.processes.wire import decode, encode

__all__ = ["MOST_RANKS", "check_timeout", "check_work", "end_rank", "engine_called", "run"]

MOST_RANKS = 1024
TIMEOUT_S = 60.0
FEW_RANKS = 8  # what is saved on each is not worth a rehearsal
REHEARSALS = 10  # after which Python has settled


def run(
    fn: Callable[..., Any],
    ranks: int = 4,
    engine: str = "shared_memory",
    args: Iterable[Any] = (),
    *,
    timeout: float | None = None,
    allow_pickle: bool = False,
) -> list[Any]:
    """Call `fn(comm, *args)` on every rank, and return what each gave, in rank order.

    Processes are forked, so `fn` may be a lambda or a closure; their results come back exactly,
    numpy arrays among them, but objects of other types need `allow_pickle=True`. When a rank
    fails, the others are ended and its error is raised here: as it was from a thread, as
    `RankFailed` from a process. `timeout` is how long any call may wait for another rank. The
    engine gloo starts processes too, and has PyTorch's Gloo carry their data.

    >>> run(lambda comm, factor: comm.rank * factor, ranks=3, engine="threads", args=(10,))
    [0, 10, 20]
    """
    check_work(fn, args)
    kind = engine_called(engine, "start")
    ranks = whole("ranks", ranks, 1, MOST_RANKS)
    arguments = tuple(args)
    limit = check_timeout("timeout", timeout)

    traces = found_trace(os.environ)

    def body(engine: Engine) -> Any:
        comm = Communicator(engine)
        start_trace(comm, traces)
        try:
            result = fn(comm, *arguments)
        except ServerFinished:
            result = None
        end_rank(comm, fn)  # a rank that fails says so instead of goodbye
        return result

    def packed(engine: Engine) -> bytes:
        result = body(engine)
        return encode(result, allow_pickle=allow_pickle, what=f"the result of rank {engine.rank}")

    if not kind.in_processes:
        return kind.start(ranks, body, select=Selection, timeout=limit)
    if ranks > FEW_RANKS:
        _rehearse()
    try:
        results = kind.start(ranks, packed, select=Selection, timeout=limit)
    except RankFailed as error:
        raise (as_raised(error) if error.kind == UnsendableError.__name__ else error) from None
    return [decode(result, allow_pickle=allow_pickle) for result in results]


@functools.cache
def _rehearse() -> None:
    """Be a rank and end, a few times, before many are forked.

    Python notes what it learns of code in that code, and where attributes were found in a table.
    What is noted before the fork, all ranks share; else each would write it into its own pages.
    """
    for _ in range(REHEARSALS):
        world = _core.World.create(1, arena=0, slot_bytes=64)
        world.enter(0)
        Communicator(SharedMemory(world, 0, Selection(1))).close()


def end_rank(comm: Communicator, fn: Callable[..., Any] | None) -> None:
    """Close the communicator of a rank whose function has returned."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(fn, "__code__", None)
    _core.work_for(None if code is None else (code, 0, code.co_firstlineno))
    try:
        comm.end("returned", together=True)
    finally:
        _core.work_for(None)


def engine_called(name: object, to: Literal["start", "join"]) -> type[Engine]:
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


def check_timeout(name: str, seconds: float | None) -> float:
    """Return a timeout in seconds, the default for None; `name` is what to call it in errors."""
    if seconds is None:
        return TIMEOUT_S
    return read_seconds(name, seconds)


def check_work(fn: object, args: object) -> None:
    """Refuse what is no function, and what are no arguments of one."""
    if not callable(fn):
        raise InvalidArgumentError(f"run needs a function of a communicator, not {shown(fn)}.")
    if not isinstance(args, Iterable) or isinstance(args, str):
        raise InvalidArgumentError(
            f"args is a tuple of what fn takes beside the communicator, not {shown(args)}."
        )
