"""How ranks end: with their parent, with a code, or because of one another."""

from __future__ import annotations

import signal
import sys
from typing import NamedTuple

from roundelay import _core
from roundelay.errors import PeerLost, RoundelayError
from roundelay.processes.amx import why_illegal

__all__ = [
    "CONSEQUENCES",
    "DEAD",
    "LOSSES",
    "ServerFinished",
    "exit_code",
    "goes_on",
    "is_consequence",
    "killed_by",
    "note_handled",
    "passes",
    "raised",
    "raised_now",
    "step_of",
]

#: What a rank raises because another one is in trouble.
CONSEQUENCES = ("CommunicationError", "PeerLost")
#: What the loss of a rank does to the job: it ends; it goes on, and fails when all others have
#: ended; it goes on.
LOSSES = _core.LOSSES
ENDS, PASSES = LOSSES.index("ends"), LOSSES.index("passes")
DEAD = _core.LIVES.index("dead")  # was lost


class ServerFinished(SystemExit):
    """Ends a rank that only served others, when these need it no more; its exit code is 0."""


def exit_code(error: SystemExit) -> int:
    """Return the exit code that Python gives for `sys.exit(...)`.

    >>> [exit_code(SystemExit(given)) for given in (None, 0, 3, "no data", 256)]
    [0, 0, 3, 1, 0]
    """
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


#: Of an exception: a communicator was made while it was handled, so it ends nothing.
HANDLED = "_roundelay_handled"


def note_handled() -> None:
    """Remember that the exception under way is one after which the program goes on."""
    if (error := sys.exception()) is not None:
        setattr(error, HANDLED, True)


class Raised(NamedTuple):
    """By what a rank fails, as `Engine.fail` takes it."""

    word: str  # "failed", or "interrupted" by Ctrl-C
    text: str


def raised_now() -> Raised | None:
    """Return the exception that is under way in this thread; None if none is that is a failure.

    Python does not tell whether somebody will catch an exception for which `finally` runs, nor
    whether an `except` has. So this only says that there is one: it is news where a rank that
    closes is still needed, and nowhere else.

    >>> try:
    ...     1 / 0
    ... except ZeroDivisionError:
    ...     print(raised_now())
    Raised(word='failed', text='ZeroDivisionError: division by zero')
    """
    error = sys.exception()
    if error is None or hasattr(error, HANDLED) or isinstance(error, GeneratorExit):
        return None
    if isinstance(error, SystemExit) and exit_code(error) == 0:
        return None
    return raised(type(error), error)


def raised(kind: type[BaseException], error: BaseException) -> Raised:
    """Say of an exception by what a rank fails that it ends."""
    word = "interrupted" if issubclass(kind, KeyboardInterrupt) else "failed"
    return Raised(word, f"{kind.__name__}: {error}")


def killed_by(number: int) -> str:
    """Name the signal that ended a process; of an illegal instruction, say why and what to do.

    >>> killed_by(signal.SIGKILL), killed_by(50)
    ('SIGKILL', 'signal 50')
    """
    if number == signal.SIGILL:
        return f"SIGILL: {why_illegal()}"
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the many that have no name
        return f"signal {number}"


def goes_on(world: _core.World, rank: int) -> bool:
    """Tell whether the job goes on without a rank that failed, or ended too soon."""
    return world.spared(rank) != ENDS and world.trouble is None


def passes(world: _core.World, rank: int) -> bool:
    """Tell whether a rank was lost whose loss is no failure of the job."""
    return world.spared(rank) == PASSES and world.life(rank) == DEAD


def step_of(world: _core.World, rank: int) -> int | None:
    """Return the step of training in which a rank was last seen, if it trains."""
    return world.step(rank) - 1 if world.step(rank) else None


def is_consequence(world: _core.World, rank: int, error: BaseException) -> bool:
    """Tell whether a rank's error only says that another rank is in trouble."""
    if isinstance(error, PeerLost):
        return True
    trouble = world.trouble
    ours = isinstance(error, (RoundelayError, _core.Broken))
    return ours and trouble is not None and trouble[1] != rank
