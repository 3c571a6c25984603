"""What ranks that are processes tell their parent: a result, or how they failed."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from roundelay import _core, errors
from roundelay.errors import InvalidArgumentError, RankFailed, RoundelayError
from roundelay.processes.channel import Channel
from roundelay.processes.children import Children
from roundelay.processes.death import goes_on, is_consequence, passes, step_of
from roundelay.processes.wire import encode

__all__ = ["as_raised", "collect", "report", "run_forked", "told_by_user"]

DONE, FAILED = b"+", b"-"
OURS = str(Path(__file__).parent.parent) + os.sep
END_S = 5.0  # for ranks that have answered to end by themselves
INTERRUPTED_S = 1.0
GRACE_S = 5.0  # for the others, once one rank has failed, to say how they fared


class RankFailure(msgspec.Struct, frozen=True, array_like=True):
    """How a rank failed, in its own words."""

    consequence: bool  # it only says that another rank is in trouble
    at: int  # nanoseconds, on the clock that all processes of a host share
    rank: int
    kind: str = ""  # of nothing: it ended with no Python error
    message: str = ""
    traceback: str = ""


_read = msgspec.msgpack.Decoder(RankFailure).decode


def report(work: Callable[[], bytes], world: _core.World, rank: int, channel: Channel) -> bool:
    """Do the work and send its result; a failure is sent too, and told to all other ranks.

    What the work forked may come back here, too; it is no rank, and neither its end nor its error
    is the rank's.
    """
    own = os.getpid()
    try:
        result = work()
        if os.getpid() == own:
            channel.send(DONE + result)
    except BaseException as error:
        if os.getpid() != own:
            raise
        failure = RankFailure(
            is_consequence(world, rank, error),
            time.monotonic_ns(),
            rank,
            type(error).__name__,
            str(error),
            told_by_user(error),
        )
        world.fail("failed", rank, f"{failure.kind}: {failure.message}")
        channel.send(FAILED + msgspec.msgpack.encode(failure))
        return False
    return True


def run_forked(size: int, body: Callable[[_core.World, int], bytes]) -> list[bytes]:
    """Run `body` on `size` new processes; return what each gave, in rank order.

    The first error of a rank is raised as `RankFailed`, when all have ended. Ranks also end when
    the thread that called this does.
    """

    def be_rank(world: _core.World, rank: int, channel: Channel) -> None:
        if not report(partial(body, world, rank), world, rank, channel):
            raise SystemExit(1)

    with Children(be_rank, size, tied=True) as children:
        try:
            results = collect(children)
        except KeyboardInterrupt:
            children.world.fail("interrupted", 0, "KeyboardInterrupt")
            children.end(grace=INTERRUPTED_S)
            raise
        children.end(grace=END_S)
        return results


def collect(children: Children) -> list[bytes]:
    """Return one result of every rank, in rank order; `RankFailed` for the one that failed first.

    Once a rank has failed, the others get a few seconds to notice, which they do with their next
    call. If the job goes on without that rank they get all the time they need, and its result is
    None where its loss is no failure.
    """
    world = children.world
    size, deadline = len(children.channels), None
    results: dict[int, bytes] = {}
    failures: dict[int, RankFailure] = {}
    while len(results) + len(failures) < size:
        for rank, message in children.messages(deadline):
            if message is not None and message[:1] == DONE:
                results[rank] = message[1:]
            elif message is not None:
                failures[rank] = _read(message[1:])
            elif rank not in results and rank not in failures:
                failures[rank] = RankFailure(consequence=False, at=time.monotonic_ns(), rank=rank)
            over = not all(goes_on(world, lost) for lost in failures)
            if len(results) + len(failures) == size or (over and deadline is None):
                break
        else:
            break  # the deadline has passed: whoever has not answered is ended by the caller
        if over and deadline is None:
            deadline = time.monotonic() + GRACE_S
    for rank in [rank for rank in failures if passes(world, rank)]:
        results[rank] = encode(None)
        del failures[rank]
    if failures:
        first = min(failures.values(), key=lambda failure: (failure.consequence, failure.at))
        raise _rank_failed(first, children)
    return [results[rank] for rank in range(size)]


def told_by_user(error: BaseException) -> str:
    """Return the traceback from where the user's own code begins."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(OURS):
            break
        trace = trace.tb_next
    return "".join(traceback.format_exception(error.with_traceback(trace)))


def _rank_failed(first: RankFailure, children: Children) -> RankFailed:
    step = step_of(children.world, first.rank)
    if not first.kind:
        return RankFailed(first.rank, ended=_ended(children.ending(first.rank)), step=step)
    return RankFailed(first.rank, first.kind, first.message, traceback=first.traceback, step=step)


def _ended(how: str) -> str:
    """Say how a process ended that raised nothing.

    >>> _ended("killed by SIGKILL")
    'was killed by SIGKILL with no Python error (out of memory?).'
    >>> _ended("exit code 3")
    'ended with exit code 3 and no Python error.'
    """
    if how == "killed by SIGKILL":
        return f"was {how} with no Python error (out of memory?)."
    if how.startswith("killed"):
        return f"was {how}, with no Python error."
    return f"ended with {how} and no Python error."


def as_raised(error: RankFailed) -> RoundelayError:
    """Return the user's own mistake as the type it had in the process that found it."""
    kind = getattr(errors, error.kind, None)
    if not isinstance(kind, type) or not issubclass(kind, InvalidArgumentError):
        return error
    raised = kind.__new__(kind)
    raised.args = (error.message,)
    return raised
