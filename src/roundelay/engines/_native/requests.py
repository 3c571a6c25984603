"""Calls and messages of the native core that are under way."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from roundelay import _core
from roundelay.engines._call import MessageCall
from roundelay.engines._native.encode import view
from roundelay.engines._native.trouble import cancelled, explain, slow_message, told_lost
from roundelay.errors import NoRoomError, PeerLost
from roundelay.processes.limits import limit_hit
from roundelay.reductions import CODES, DTYPES

if TYPE_CHECKING:
    from roundelay.engines._native.engine import NativeEngine

#: The native core's numbers for a message that nobody carries any more, or whose rank is lost.
BROKEN, LOST = 3, 4
#: A message as the native core takes it: whether it is sent, who is at the other end, the number of
#: the group, its tag, the memory, the dtype, and whether it goes on in the background.
Described = tuple[bool, int, int, int, _core.View, int, bool]


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


class RepeatedMessage:
    """A message that is made again and again, with the same memory, and waited for."""

    def __init__(self, engine: NativeEngine, message: MessageCall) -> None:
        self._engine, self._message = engine, message
        self._described = described(engine, message)
        self._slow = partial(slow_message, engine)

    def __call__(self) -> None:
        """Make it, and return when it is done, or raise what went wrong."""
        engine = self._engine
        request = posted(engine, self._message, self._described)
        try:
            if not request.done and engine.native is not None:
                engine._messages.wait(request, engine.native, engine.timeout, self._slow)
        except _core.Broken:
            raise explain(engine) from None
        if request.fate or not request.done:
            NativeMessageRequest(engine, request).wait()


def described(engine: NativeEngine, message: MessageCall) -> Described:
    """Return a message in the words of the native core."""
    rank = -1 if message.other is None else engine.ranks[message.other]
    tag = _core.ANY_TAG if message.tag is None else message.tag
    memory, code = view(message.data), CODES[message.dtype]
    return message.sends, rank, engine._serial, tag, memory, code, message.background


def posted(engine: NativeEngine, message: MessageCall, what: Described) -> _core.MessageRequest:
    """Make a message; it may not be done yet."""
    native, other = engine._open(), message.other
    if message.sends and other is not None:
        if engine.losses and (told := engine.lost().get(other)):
            raise PeerLost(told)
        engine._sent[other] += message.data.nbytes
    try:
        return engine._messages.post(*what, native)
    except _core.OutOfMemory:
        raise NoRoomError(message.data.nbytes) from None
    except _core.Broken:
        raise explain(engine) from None
    except OSError as error:
        raise limit_hit("send" if message.sends else "recv", error) or error from None
