"""Ranks as forked children of this process: started together, watched, and none left behind.

Forking carries any function along, a lambda or a closure too, and starts in milliseconds. As with
every fork, locks that other threads of this process hold stay locked in the children; the ones of
Python itself and of this package are safe.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn, Self

from roundelay import _core
from roundelay.engines._channel import Channel
from roundelay.engines._death import end_with_parent, exit_code, killed_by, load_prctl
from roundelay.engines._descriptors import allow_descriptors
from roundelay.engines._limits import telling_limits
from roundelay.engines._native import make_world
from roundelay.errors import LimitError, MeetingError

__all__ = ["Children"]

READY, GO = b"ready", b"go"
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
        self.channels: list[Channel] = []
        self._pids: list[int] = []
        self._exits: dict[int, int] = {}  # exit codes of the ranks that have ended
        self._watched: dict[int, int] = {}  # descriptors that tell the end of a rank
        self._owner = os.getpid()
        load_prctl()
        for stream in (sys.stdout, sys.stderr):  # or the children would write it once more
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        pipes: list[tuple[int, int]] = []
        try:
            with telling_limits(what):
                # A pipe, a channel and one that tells of its end.
                allow_descriptors(4 * size + SPARE)
                for _ in range(size):
                    pipes.append(os.pipe())  # noqa: PERF401 - so that those made are let go of
                for rank in range(size):
                    self._fork(body, rank, pipes, tied=tied)
            self._let_go(pipes)
            self._meet()
        except BaseException:
            self._let_go(pipes)
            self.end()
            raise

    def _fork(self, body: Body, rank: int, pipes: list[tuple[int, int]], *, tied: bool) -> None:
        mine, theirs = Channel.pair()
        with warnings.catch_warnings():
            # Newer Pythons warn of any fork while threads run; see above for why it is done here.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                pid = os.fork()
            except OSError:
                mine.close()
                theirs.close()
                raise
        if pid == 0:
            self._be_rank(body, rank, pipes, theirs, tied=tied)
        theirs.close()
        self.channels.append(mine)
        self._pids.append(pid)
        try:
            self._watched[rank] = os.pidfd_open(pid)
        except OSError:  # nobody would be told of its end: it is ended here
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def _be_rank(
        self, body: Body, rank: int, pipes: list[tuple[int, int]], channel: Channel, *, tied: bool
    ) -> NoReturn:
        """Run in the child: nothing may get out of here into the parent's program."""
        code, ready = 1, False
        try:
            gc.freeze()  # what is inherited is not looked through, and so stays shared
            _forget_parents_signals()
            if tied:
                end_with_parent(self._owner)
            for fd in self._watched.values():
                os.close(fd)
            ends = [-1 if other == rank else reader for other, (reader, _) in enumerate(pipes)]
            for other, (reader, writer) in enumerate(pipes):
                os.close(reader if other == rank else writer)
            with telling_limits(f"rank {rank} of {self.world.size}"):
                world = _core.World.attach(self.world.fd, self.world.token)
                world.enter(rank)
                # Each rank alone holds the writing end of its pipe: the end of that is its death.
                world.watch(ends, pipes[rank][1])
            ready = channel.send(READY)
            if channel.receive() == GO:  # every rank has entered
                body(world, rank, channel)
                world.leave(rank)
            code = 0
        except SystemExit as error:
            code = exit_code(error)
        except BaseException as error:  # noqa: BLE001 - it has nowhere else to go
            if isinstance(error, LimitError) and not ready:
                channel.send(str(error).encode())  # the parent raises it
            else:
                traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            os._exit(code)

    @staticmethod
    def _let_go(pipes: list[tuple[int, int]]) -> None:
        while pipes:
            for fd in pipes.pop():
                os.close(fd)

    def _meet(self) -> None:
        for rank, channel in enumerate(self.channels):
            if (word := channel.receive()) == READY:
                continue
            if word is not None:
                raise LimitError(word.decode())
            raise MeetingError(f"rank {rank} ended before it had started: {self.ending(rank)}.")
        for channel in self.channels:
            channel.send(GO)

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
                    if ended and (rank, False) in ready and self._has_more(selector, rank):
                        continue
                    if ended:
                        selector.unregister(self._watched[rank])
                        with contextlib.suppress(KeyError):
                            selector.unregister(self.channels[rank])
                        self._reap(rank)
                        yield rank, None
                    elif (message := self.channels[rank].receive()) is None:
                        selector.unregister(self.channels[rank])
                    else:
                        yield rank, message

    def _has_more(self, selector: selectors.BaseSelector, rank: int) -> bool:
        """Tell whether the line of an ended rank is still read from; its end comes by itself."""
        try:
            selector.get_key(self.channels[rank])
        except KeyError:
            return False
        return True

    def _reap(self, rank: int) -> None:
        if rank in self._exits:
            return
        try:
            status = os.waitpid(self._pids[rank], 0)[1]
            self._exits[rank] = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # the program waits for all children by itself
            self._exits[rank] = UNKNOWN_EXIT
        os.close(self._watched.pop(rank))

    def exit_of(self, rank: int) -> int | None:
        """Return how a rank ended: its exit code, minus the signal that killed it, None if not."""
        return self._exits.get(rank)

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


def _forget_parents_signals() -> None:
    signal.set_wakeup_fd(-1)
    # Ctrl-C reaches the whole terminal; the parent decides, and its children hear it from there.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
