"""`rd.init`: the communicator of a script that a launcher started once for every rank."""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType

from roundelay import _core
from roundelay.communicator import Communicator
from roundelay.engines import engines
from roundelay.engines._native import make_world
from roundelay.engines._rendezvous import meet
from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.launch.environment import found_place, found_timeout
from roundelay.launch.local import check_timeout
from roundelay.tuning import host_tuning

__all__ = ["init"]


class _Started:
    """The one communicator that a process gets from its launcher, and how it says goodbye."""

    def __init__(self, comm: Communicator, world: _core.World) -> None:
        self.comm, self.world, self.pid = comm, world, os.getpid()
        self._show = sys.excepthook

    def install(self) -> None:
        """Have the other ranks told how this one ends."""
        sys.excepthook = self._tell_and_show
        atexit.register(self._leave)

    def _tell_and_show(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() == self.pid:
            # The others hear of it before this rank has even printed it.
            word = "interrupted" if issubclass(kind, KeyboardInterrupt) else "failed"
            self.world.fail(word, self.comm.rank, f"{kind.__name__}: {error}")
        self._show(kind, error, trace)

    def _leave(self) -> None:
        if os.getpid() == self.pid:
            self.comm.close()


_started: _Started | None = None  # a process has one launcher, so one of these


def init(engine: str | None = None, timeout: float | None = None) -> Communicator:
    """Return the communicator of all ranks that the launcher started; alone, of this one rank.

    Finds its place from the variables that `roundelay run` and torchrun set. When called again it
    returns the same communicator. `timeout` is how long the ranks wait for one another, here and
    in every call. A rank that ends by an exception takes the others with it, at once and by name.
    """
    global _started  # noqa: PLW0603 - see above
    _check_engine(engine)
    if _started is not None:
        if _started.pid != os.getpid():
            raise InvalidArgumentError(
                f"This process is a fork of rank {_started.comm.rank} (process {_started.pid}), "
                f"not a rank. Start ranks with `roundelay run` or rd.run."
            )
        return _started.comm
    limit = check_timeout("timeout", timeout if timeout is not None else found_timeout(os.environ))
    place = found_place(os.environ)
    if place.job.size == 1:
        world = make_world(1)
        world.enter(0)
    else:
        world = meet(place.job, place.rank, timeout=limit)
    _started = _Started(
        Communicator(world, place.rank, tuning=host_tuning(world.size), timeout=limit), world
    )
    _started.install()
    return _started.comm


def _check_engine(engine: str | None) -> None:
    if engine in (None, "shared_memory"):
        return
    if engine in engines.names():
        raise InvalidArgumentError(
            f"init joins processes that a launcher started, with the engine shared_memory; "
            f"for {engine} see rd.run."
        )
    raise UnknownNameError("engines", str(engine), ["shared_memory"])
