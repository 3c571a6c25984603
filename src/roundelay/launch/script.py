"""`rd.init`: the communicator of a script that a launcher started once for every rank."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

from roundelay import _core
from roundelay.arguments import FOREVER_S
from roundelay.communicator import Communicator
from roundelay.communicator.selection import Selection
from roundelay.communicator.tracing import found_trace, start_trace
from roundelay.engines import Engine
from roundelay.engines.mpi.library import version_of_mpi
from roundelay.errors import InvalidArgumentError, RoundelayError
from roundelay.launch.environment import found_place, found_timeout, refuse_split
from roundelay.launch.local import check_timeout, end_rank, engine_called
from roundelay.launch.store import job_store
from roundelay.processes.death import ServerFinished, raised
from roundelay.processes.launcher_line import tell_blame, tell_launcher

__all__ = ["be_rank", "init"]


class _Started:
    """The one communicator that a process gets from its launcher; others are told how it ends."""

    def __init__(self, engine: Engine) -> None:
        self.comm, self._engine, self.pid = Communicator(engine), engine, os.getpid()
        self._show = sys.excepthook

    def stay(self) -> None:
        """Be a rank until the process ends, and tell by Python's hooks how it does."""
        sys.excepthook = self._tell_and_show
        atexit.register(self._leave)

    def tell(self, kind: type[BaseException], error: BaseException) -> None:
        """Let the others know of an exception that ends this rank."""
        self._engine.fail(*raised(kind, error))

    def _tell_and_show(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        mine = os.getpid() == self.pid
        if mine:
            tell_blame(self.comm.rank, error, self._engine.failed_first())
            # The others hear of it before this rank has even printed it.
            self.tell(kind, error)
        self._show(kind, error, trace)
        if mine:
            sys.stderr.flush()
            sys.stdout.flush()
            self._engine.abort()

    def _leave(self) -> None:
        # Who has failed does not close; a job that goes on would wait for the others to do so.
        if os.getpid() != self.pid or self.comm.rank in self.comm.lost():
            return
        try:
            self.comm.end("script", together=True)
        except RoundelayError as error:
            self._show(type(error), error, error.__traceback__)
            _core.fail_at_exit()


_started: _Started | None = None  # a process has one launcher, so one of these


def init(engine: str | None = None, timeout: float | None = None) -> Communicator:
    """Return the communicator of all ranks that the launcher started; alone, of this one rank.

    Finds its place from the variables that `roundelay run`, torchrun and mpirun set. All ranks on
    one host share memory; several hosts do so inside, and are joined by Gloo or by MPI. `engine`
    may name one engine for all: shared_memory, gloo, mpi or nccl. When called again it returns the
    same communicator. `timeout` is how long the ranks wait for one another, here and in every
    call. A rank that ends by an exception takes the others with it, at once and by name.
    """
    global _started  # noqa: PLW0603 - see above
    if engine is not None:
        engine_called(engine, "join")
    if _started is not None:
        if _started.pid != os.getpid():
            raise InvalidArgumentError(
                f"This process is a fork of rank {_started.comm.rank} (process {_started.pid}), "
                f"not a rank. Start ranks with `roundelay run` or rd.run."
            )
        return _started.comm
    default = found_timeout(os.environ)  # read in any case: a wrong one is told
    limit = check_timeout("timeout", default if timeout is None else timeout)
    place = found_place(os.environ)
    # Without a name: shared memory where all ranks are on one host; else that inside every host.
    several = "shared_memory" if place.by == "host" else "hierarchical"
    joined = engine_called(engine or several, "join").join(
        place,
        partial(job_store, place, os.environ, limit),
        select=Selection,
        timeout=min(limit, FOREVER_S),  # sockets and stores know no infinity
    )
    if engine == "mpi" or place.by == "mpi":
        refuse_split(os.environ, joined.size, version_of_mpi())
    joined.on_spare = partial(tell_launcher, joined.rank)
    _started = _Started(joined)
    _started.stay()
    start_trace(_started.comm, found_trace(os.environ))
    return _started.comm


@contextlib.contextmanager
def be_rank(
    join: Callable[[], Engine], fn: Callable[..., Any] | None = None
) -> Iterator[Communicator]:
    """Be a rank while the block runs: `init` returns its communicator, which is closed at the end.

    For those who start ranks where Python's hooks are not called. An exception is told to the other
    ranks before it goes on; only a server that is no longer needed may end by one. `fn` is the
    user's function that the block calls, for errors to name.
    """
    global _started  # noqa: PLW0603 - see above
    if _started is not None:
        comm = _started.comm
        raise InvalidArgumentError(
            f"This process is rank {comm.rank} of {comm.size} already, and can't be a rank of "
            f"another job before that one has ended. Let another process be that rank."
        )
    engine = join()
    started = _started = _Started(engine)
    try:
        start_trace(started.comm, found_trace(os.environ))
        with contextlib.suppress(ServerFinished):
            yield started.comm
        end_rank(started.comm, fn)
    except BaseException as error:
        started.tell(type(error), error)
        with contextlib.suppress(RoundelayError):  # which says what was said
            started.comm.end("closed", together=False)
        raise
    finally:
        _started = None
