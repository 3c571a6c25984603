"""Ranks as forked children of this process: started together, watched, and none left behind.

Forking carries any function along, a lambda or a closure too, and starts in milliseconds. As with
every fork, locks that other threads of this process hold stay locked in the children; the ones of
Python itself and of this package are safe.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn, Self

from roundelay import _core
from roundelay.errors import LimitError, RendezvousError
from roundelay.processes.channel import Channel
from roundelay.processes.death import exit_code, killed_by
from roundelay.processes.limits import allow_descriptors, limit_hit, telling_limits
from roundelay.processes.world import make_world

__all__ = ["Children"]

HERE = b""  # says a rank, and then its parent when all are
GRACE_S = 5.0  # for what a signal asks politely
UNKNOWN_EXIT = 255
SPARE = 64  # descriptors, for what the ranks themselves open

#: What a child does once it is a rank; it ends when this returns.
Body = Callable[[_core.World, int, Channel], None]


class Children:
    """`size` processes, each a rank of one world, that run `body`; use as a context manager.

    With `tied`, they also end at once when the thread that made them does.
    """

    def __init__(self, body: Body, size: int, *, tied: bool) -> None:
        what = f"a job of {size} ranks"
        with telling_limits(what):
            self.world = make_world(size)
        self._exits: dict[int, int] = {}  # exit codes of the ranks that have ended
        self._owner = os.getpid()
        _flush_output()  # or the children would write it once more
        try:
            # For each: a pipe, a socket, and a descriptor that tells of its end.
            allow_descriptors(5 * size + SPARE)
            forked = _core.fork_ranks(size, tied, _heedless)
        except OSError as error:
            raise limit_hit(what, error) or error from None
        if forked.rank >= 0:
            self._be_rank(body, forked)
        self._pids = forked.pids
        self._watched = dict(enumerate(forked.ends))  # descriptors that tell the end of a rank
        self.channels = [Channel.to_child(end) for end in forked.channels]
        try:
            self._meet()
        except BaseException:
            self.end()
            raise

    def _be_rank(self, body: Body, forked: _core.Forked) -> NoReturn:
        """Run in the child: nothing may get out of here into the parent's program."""
        code, rank, world, own = 1, forked.rank, None, os.getpid()
        try:
            world = forked.join(self.world)
            if world is not None:
                body(world, rank, Channel(forked.channel))
                if os.getpid() == own:  # else what the rank has forked came back here
                    world.leave(rank)
            code = 0
        except SystemExit as error:
            code = exit_code(error)
        except BaseException as error:  # noqa: BLE001 - it has nowhere else to go
            limit = None
            if world is None and isinstance(error, OSError):
                limit = limit_hit(f"rank {rank} of {self.world.size}", error)
            if limit is not None:
                Channel(forked.channel).send(str(limit).encode())  # the parent raises it
            else:
                traceback.print_exc()
        finally:
            _flush_output()
            os._exit(code)

    def _meet(self) -> None:
        for rank, channel in enumerate(self.channels):
            if (word := channel.receive()) == HERE:
                continue
            if word is not None:
                raise LimitError(word.decode())
            raise RendezvousError(f"rank {rank} ended before it had started: {self.ending(rank)}.")
        for channel in self.channels:
            channel.send(HERE)

    def messages(self, deadline: float | None = None) -> Iterator[tuple[int, bytes | None]]:
        """Yield what ranks send as it comes, and None for a rank that ends, until all have ended.

        Stops early when `deadline`, on the monotonic clock, has passed; the caller may go on later.
        """
        with selectors.PollSelector() as selector:  # which needs no descriptor of its own
            for rank, watched in self._watched.items():
                selector.register(watched, selectors.EVENT_READ, (rank, True))
                selector.register(self.channels[rank], selectors.EVENT_READ, (rank, False))
            while selector.get_map():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return
                # Messages first: a rank may have sent its last and ended in the same moment.
                ready = sorted(key.data for key, _ in selector.select(left))
                for rank, ended in ready:
                    heard = self.channels[rank] in selector.get_map()
                    if ended and (rank, False) in ready and heard:
                        continue
                    if ended:
                        selector.unregister(self._watched[rank])
                        if heard:
                            selector.unregister(self.channels[rank])
                        self._reap(rank)
                        yield rank, None
                    elif (message := self.channels[rank].receive()) is None:
                        selector.unregister(self.channels[rank])
                    else:
                        yield rank, message

    def _reap(self, rank: int) -> None:
        if rank in self._exits:
            return
        try:
            status = os.waitpid(self._pids[rank], 0)[1]
            self._exits[rank] = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # the program waits for all children by itself
            self._exits[rank] = UNKNOWN_EXIT
        os.close(self._watched.pop(rank))

    def ending(self, rank: int) -> str:
        """Say how a rank ended, waiting for it."""
        self._reap(rank)
        code = self._exits[rank]
        return f"killed by {killed_by(-code)}" if code < 0 else f"exit code {code}"

    def end(self, *, grace: float = 0.0) -> None:
        """End whoever still runs: wait `grace` seconds, then ask, then kill; all are reaped."""
        if os.getpid() != self._owner:
            return
        for seconds, number in ((grace, None), (GRACE_S, signal.SIGTERM), (60.0, signal.SIGKILL)):
            if number is not None:
                for rank in self._watched:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self._pids[rank], number)
            for _ in self.messages(time.monotonic() + seconds):
                pass
            if not self._watched:
                break
        for channel in self.channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _heedless(*_: object) -> None:
    """Do nothing at Ctrl-C."""
