"""Who listens for this rank: whoever waits for an operation, or a thread when nobody does."""

from __future__ import annotations

import threading
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import NoReturn

from roundelay.errors import InvalidArgumentError

__all__ = ["Turns", "refuse_nested"]

#: Seconds for which nobody has listened or submitted before the thread listens: a program that
#: waits for one operation after the other does all of it on its own thread, with none to wake up.
GRACE = 0.001
#: So many times that long, and the thread does beside a program that goes on submitting: backward
#: passes that take longer overlap with operations.
BURST = 4


def refuse_nested() -> NoReturn:
    """Refuse to wait where this thread is in the midst of it already."""
    raise InvalidArgumentError(
        "hvd waits for an operation on this thread, in the midst of another one: a signal handler, "
        "a finalizer or a hook can't. Begin it there by …_async."
    )


class Turns:
    """One listener at a time: `step` hears once, and acts on what it has heard."""

    def __init__(
        self,
        step: Callable[[bool], bool],  # told whether it is the thread that listens, which may
        needed: Callable[[], bool],  #   wait for ever; tells whether somebody waited for it
        broke: Callable[[BaseException], None],
    ) -> None:
        self._step, self._needed, self._broke = step, needed, broke
        self._turn, self._bell = allocate_lock(), allocate_lock()
        self._bell.acquire()
        self._taken = 0  # how often callers took and left the turn
        self._rung = 0  # how often they submitted something
        self._dozing = False  # the thread sleeps until it is rung for
        self._alarms: list[tuple[float, Callable[[], None]]] = []
        self._listener = 0
        self._over = False
        self._thread = threading.Thread(target=self._serve, name="roundelay-horovod", daemon=True)
        self._thread.start()

    def ring(self) -> None:
        """Have the thread look whether it is needed."""
        self._rung += 1
        if self._dozing:
            self._dozing = False
            with suppress(RuntimeError):  # somebody else has rung
                self._bell.release()

    def take(
        self, done: Callable[[], bool], alarms: Sequence[tuple[float, Callable[[], None]]] = ()
    ) -> bool:
        """Listen until it is done, unless another does, and tell whether that was so.

        After so many seconds, more each time, the thread calls each of `alarms`.
        """
        if not self._turn.acquire(blocking=False):
            if self._listener == get_ident():
                refuse_nested()
            return False
        self._listener = get_ident()
        now = monotonic()
        self._alarms = [(now + seconds, call) for seconds, call in alarms]
        self._taken += 1
        try:
            while not done():
                self._step(False)  # noqa: FBT003 - see above
        except BaseException as error:
            self._broke(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._alarms, self._listener = [], 0
            self._taken += 1
            self._turn.release()
            if self._needed():
                self.ring()
        return True

    def end(self, seconds: float) -> None:
        """Wait for the thread, which ends with what was decided last."""
        self.ring()
        self._thread.join(seconds)

    def stop(self) -> None:
        """Let the thread end: nothing more will be heard."""
        self._over = True
        self.ring()

    def alive(self) -> bool:
        """Tell whether there is anybody to listen."""
        return not self._over

    def _serve(self) -> None:
        seen, rung, burst = -1, -1, 0
        while not self._over:
            untaken, quiet = seen == self._taken, rung == self._rung
            seen, rung, burst = self._taken, self._rung, burst + 1 if untaken else 0
            if not untaken or not (quiet or burst > BURST):
                self._bell.acquire(timeout=GRACE)
                continue
            now, seen = seen, -1  # whatever comes, callers go first for a while
            if not self._turn.acquire(blocking=False):
                self._doze(partial(self._was_taken, now))
            else:
                try:
                    self._listen()
                except BaseException as error:  # noqa: BLE001 - told to whoever waits
                    self._broke(error)
                finally:
                    self._turn.release()
                if not self._needed():
                    self._doze(self._needed)

    def _listen(self) -> None:
        """Listen while that is needed, and until something ends that somebody waits for."""
        waited = False
        while not self._over and self._needed() and not waited:
            waited = self._step(True)  # noqa: FBT003 - see above

    def _was_taken(self, since: int) -> bool:
        return self._taken != since

    def _doze(self, look: Callable[[], bool]) -> None:
        """Sleep until somebody rings, or who listens has waited too long."""
        self._dozing = True
        if self._over or look():  # those who change what is looked at ring afterwards
            self._dozing = False
            return
        alarms = self._alarms
        limit = -1.0
        if alarms:
            limit = min(max(0.0, alarms[0][0] - monotonic()), threading.TIMEOUT_MAX)
        rung = self._bell.acquire(timeout=limit)
        self._dozing = False
        if not rung and alarms and self._alarms is alarms:
            _, call = alarms.pop(0)
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - told to whoever waits
                self._broke(error)
