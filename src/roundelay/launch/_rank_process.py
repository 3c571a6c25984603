"""One rank of a job as its launcher sees it: a process, two streams of output, and an end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial

from roundelay import _core
from roundelay.errors import RoundelayError
from roundelay.launch._output import RankOutput, Screen
from roundelay.launch._traceback_capture import ErrorStream
from roundelay.launch.ending import RankEnd
from roundelay.processes.limits import limit_hit

PIECE = 1 << 16
UNKNOWN = 255  # how it ended is not known: somebody else has waited for it


class RankProcess:
    """A process that is started at once and reaped by `close`, so that its id stays its own."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        screens: tuple[Screen, Screen],
        selector: selectors.BaseSelector,
        inherits: int,
    ) -> None:
        self.rank = rank
        self.has_ended = False
        self._told = False
        self._process = _start(rank, command, environment, inherits)
        self._errors = ErrorStream(rank, screens[1])
        self._streams: dict[int, RankOutput] = {}  # those that are open, by descriptor
        self._all = RankOutput(rank, screens[0]), self._errors
        for stream, pipe in zip(
            self._all, (self._process.stdout, self._process.stderr), strict=True
        ):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._streams[pipe.fileno()] = stream
                read = partial(self._read, selector, pipe.fileno())
                selector.register(pipe.fileno(), selectors.EVENT_READ, read)
        self._watched = os.pidfd_open(self._process.pid)
        selector.register(self._watched, selectors.EVENT_READ, partial(self._ended, selector))

    def _read(self, selector: selectors.BaseSelector, fd: int) -> bool:
        """Take what has come; tell whether there may be more."""
        try:
            data = os.read(fd, PIECE)
        except BlockingIOError:
            return False
        if data:
            self._streams[fd].feed(data)
        else:
            selector.unregister(fd)
            self._streams.pop(fd).close()
        return bool(data)

    def _ended(self, selector: selectors.BaseSelector) -> None:
        # Its last words come before its end.
        for fd in list(self._streams):
            while self._read(selector, fd):
                pass
        selector.unregister(self._watched)
        self.has_ended = True

    @property
    def has_output(self) -> bool:
        """Tell whether more output may come."""
        return bool(self._streams)

    def due(self) -> float | None:
        """Return when something should be shown that waits for more."""
        return min((due for each in self._all if (due := each.due()) is not None), default=None)

    def show(self, now: float) -> None:
        """Show what has waited long enough."""
        for stream in self._all:
            if not self.has_ended and (due := stream.due()) is not None and due <= now:
                stream.show_rest()

    def end(self) -> RankEnd:
        """Return how the process ended, waiting for it; what it held back for nothing is shown."""
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        code = UNKNOWN if status is None else status.si_status
        if status is not None and status.si_code != os.CLD_EXITED:
            code = -code
        if code == 0:
            self._errors.release()
        words = b"\n".join(self._errors.traceback) if code else b""
        error = self._errors.error_name() if code > 0 else ""
        return RankEnd(self.rank, code, error, words, self._told)

    def finish_output(self) -> None:
        """Show the ends of lines that will get no end."""
        for stream in self._all:
            stream.close()

    def tell(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if not self.has_ended:
            self._told = True
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill_group(self) -> None:
        """Kill the process and all that it started and that stayed with it."""
        self._told = self._told or not self.has_ended
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, selector: selectors.BaseSelector) -> None:
        """Reap the process and let go of everything."""
        for fd in self._streams:
            selector.unregister(fd)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._process.wait()
        os.close(self._watched)


def _start(
    rank: int, command: Sequence[str], environment: Mapping[str, str], inherits: int
) -> subprocess.Popen[bytes]:
    launcher = os.getpid()
    try:
        # A session of its own: Ctrl-C comes by way of the launcher, and its children can be found.
        return subprocess.Popen(  # noqa: S603 - what the user asked for
            command,
            env=environment,
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(inherits,),
            preexec_fn=lambda: _core.end_with_parent(launcher),  # noqa: PLW1509 - there is one thread
        )
    except OSError as error:
        named = limit_hit(f"rank {rank} can't be started", error)
        raise named or RoundelayError(f"rank {rank} can't be started: {error}.") from None
