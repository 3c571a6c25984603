"""Calls and messages of the native core that are under way."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from roundelay import _core
from roundelay.engines._native.trouble import cancelled, explain, slow_message, told_lost
from roundelay.errors import PeerLost
from roundelay.reductions import DTYPES

if TYPE_CHECKING:
    from roundelay.engines._native.engine import NativeEngine

#: The native core's numbers for a message that nobody carries any more, or whose rank is lost.
BROKEN, LOST = 3, 4


class NativeCallRequest:
    """A call on the progress thread, and the buffers that it needs."""

    def __init__(self, engine: NativeEngine, request: _core.CallRequest, buffers: object) -> None:
        self._engine, self._request, self._buffers = engine, request, buffers

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        try:
            return self._request.done
        except _core.Broken:
            raise explain(self._engine) from None

    def wait(self) -> None:
        """Return when it is done, or raise what went wrong."""
        try:
            self._request.wait(self._engine.slow)
        except _core.Broken:
            raise explain(self._engine) from None
        self._buffers = None

    def times(self) -> tuple[float, float]:
        """Return when it began and ended, by the monotonic clock."""
        return self._request.times


class NativeMessageRequest:
    """A message between two ranks of this host."""

    def __init__(self, engine: NativeEngine, request: _core.MessageRequest) -> None:
        self._engine, self._request = engine, request

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        engine = self._engine
        try:
            return engine.native is None or engine._messages.settled(self._request, engine.native)
        except _core.Broken:
            raise explain(engine) from None

    def wait_for_it(self, known: int = -1) -> bool:
        """Wait until it is done, or more ranks are lost than are known."""
        engine, request = self._engine, self._request
        try:
            if engine.native is not None:
                slow = partial(slow_message, engine)
                engine._messages.wait(request, engine.native, engine.timeout, slow, known)
        except _core.Broken:
            raise explain(engine) from None
        return request.done

    def wait(self) -> None:
        """Return when it is done, or raise what went wrong."""
        engine, request = self._engine, self._request
        self.wait_for_it()
        if request.fate == LOST:
            raise PeerLost(told_lost(engine.world, request.status[0]))
        if not request.done or request.fate == BROKEN:  # closed, and not in peace
            raise explain(engine)
        if request.fate:
            raise cancelled(engine, request)

    def status(self) -> tuple[int, int, int, str]:
        """Say who sent what has come: the rank, the tag, the number of bytes and the dtype."""
        source, tag, nbytes, dtype = self._request.status
        return self._engine.ranks.index(source), tag, nbytes, DTYPES[dtype]
