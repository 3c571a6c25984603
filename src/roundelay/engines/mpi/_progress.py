"""What MPI has under way in this process, and who sees to it that it goes on.

MPI moves data only while somebody calls it. So whoever waits here keeps asking, and for calls in
the background there is a thread that does, where MPI allows threads.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, Protocol

from roundelay.engines._call import Request

#: Looks that only give way to others, before waiting sleeps; with more ranks than cores, too.
QUICK_LOOKS = 50
SHORTEST_S, LONGEST_S = 20e-6, 0.5e-3

#: Yields what must be done before it goes on.
Steps = Generator[list[Request], None, None]


class Requests:
    """Requests of MPI's, and the memory that they need until they are done."""

    def __init__(self, begun: Iterable[Any], *kept: object) -> None:  # Any: see load_mpi
        self._begun, self._kept = list(begun), kept

    def done(self) -> bool:
        """Ask MPI, which lets them go on."""
        if self._begun:
            self._begun = [request for request in self._begun if not request.Test()]
        if not self._begun:
            self._kept = ()
        return not self._begun

    def wait(self) -> None:
        """Return when they are done."""
        pause = Pause()
        while not self.done():
            pause.take()


class Moving(Protocol):
    """Something that goes on by being asked."""

    def poll(self) -> bool:
        """Go on as far as possible without waiting; tell whether anything moved."""

    def idle(self) -> bool:
        """Tell whether there is nothing left to ask for."""


class Pause:
    """Between two looks at MPI: first give way to others, then sleep, longer each time."""

    def __init__(self, quick_looks: int = QUICK_LOOKS) -> None:
        self._quick_looks = quick_looks
        self._looks, self._seconds = 0, SHORTEST_S

    def take(self, *, moved: bool = False) -> None:
        """Pause; something that moved is likely to move on soon."""
        if moved:
            self._looks, self._seconds = 0, SHORTEST_S
        if self._looks < self._quick_looks:
            self._looks += 1
            os.sched_yield()
            return
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, LONGEST_S)


class MpiProgress:
    """All that is under way in a process; waits on it, and a thread for what nobody waits on."""

    def __init__(self, *, threaded: bool) -> None:
        self.lock = threading.RLock()
        self._threaded = threaded
        self._moving: list[Moving] = []
        self._wanted = threading.Event()  # by somebody who does not wait
        self._thread: threading.Thread | None = None
        self._ends = False

    def add(self, moving: Moving, *, background: bool) -> None:
        """See to something from now on, until it is idle."""
        with self.lock:
            if moving not in self._moving:
                self._moving.append(moving)
            if not background or not self._threaded:
                return
            if self._thread is None and not self._ends:
                self._thread = threading.Thread(
                    target=self._see_to_it, name="roundelay mpi", daemon=True
                )
                self._thread.start()
                atexit.register(self.stop)  # nobody may call MPI after its end
        self._wanted.set()

    def poll(self) -> bool:
        """Let everything go on; False at once where another thread is doing so."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            moved = [moving.poll() for moving in self._moving]
            self._moving = [moving for moving in self._moving if not moving.idle()]
            return any(moved)
        finally:
            self.lock.release()

    def wait(self, done: Callable[[], bool], give_up: Callable[[], None]) -> None:
        """Return when `done` says so; `give_up` is asked now and then, and may raise."""
        pause = Pause()
        while not done():
            moved = self.poll()
            if not done():
                if not moved:
                    give_up()
                pause.take(moved=moved)

    def stop(self) -> None:
        """End the thread."""
        self._ends = True
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _see_to_it(self) -> None:
        pause = Pause(quick_looks=0)  # the core belongs to whoever computes
        while not self._ends:
            if not self._moving:
                self._wanted.wait()
                self._wanted.clear()
            pause.take(moved=self.poll())


class PolledCall:
    """One call under way: steps, each of which begins when all of the one before is done."""

    def __init__(self, steps: Steps, what: str) -> None:
        self.what, self.over = what, False
        self._steps, self._open = steps, list[Request]()

    def go_on(self) -> bool:
        """Take the next step if this one is done; tell whether."""
        self._open = [request for request in self._open if not request.done()]
        if self._open:
            return False
        try:
            self._open = next(self._steps)
        except StopIteration:
            self.over = True
        return True


class PolledQueue:
    """The calls of one engine, strictly one after the other, as on all its other ranks."""

    def __init__(self, on_error: Callable[[Exception, str], None]) -> None:
        self.moved_at = 0.0  # by the monotonic clock
        self._calls: deque[PolledCall] = deque()
        self._on_error = on_error
        self._abandoned: list[PolledCall] = []  # MPI may still write into their memory

    def add(self, call: PolledCall) -> None:
        """Let a call stand in line."""
        if not self._calls:
            self.moved_at = time.monotonic()
        self._calls.append(call)

    def poll(self) -> bool:
        """Go on with the first call, and with the next when that is over."""
        moved = False
        while self._calls:
            call = self._calls[0]
            try:
                if not call.go_on():
                    break
            except Exception as error:  # noqa: BLE001 - told to all who wait on this engine
                self._on_error(error, call.what)
                return True
            moved = True
            self.moved_at = time.monotonic()
            if call.over:
                self._calls.popleft()
        return moved

    def abandon(self) -> None:
        """Go on with nothing more."""
        self._abandoned += self._calls
        self._calls.clear()

    def idle(self) -> bool:
        """Tell whether nobody stands in line."""
        return not self._calls
