"""Messages between two ranks: send, recv and sendrecv with tags."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Generic, TypeAlias, cast

import numpy as np

from roundelay._typing import Buffer, BufferT, ResultT
from roundelay.arguments import index_of, shown
from roundelay.communicator.buffers import Bound, bind
from roundelay.communicator.call_trace import MessageMark
from roundelay.communicator.memory import Memory, apart, contiguous, require_host
from roundelay.engines import INNER_TAGS, Engine, MessageCall, MessageRequest
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, rank_count

__all__ = ["ANY", "Exchange", "Message", "PointToPoint", "Wanted"]


class _Any:
    def __repr__(self) -> str:
        return "rd.ANY"


#: Any source, or any tag.
ANY: Final = _Any()
#: The number of a rank or a tag, or any.
Wanted: TypeAlias = int | _Any
#: What is entered while a message is waited for.
Mark: TypeAlias = "AbstractContextManager[None] | MessageMark"
NOT_TRACED: Final = nullcontext()


class Message(Generic[ResultT]):
    """A send or receive under way; after `wait`, `source` and `tag` say what came."""

    def __init__(
        self, rank: int, request: MessageRequest, bound: Bound, keep: Any, mark: Mark
    ) -> None:
        self._rank, self.request, self._bound, self._keep = rank, request, bound, keep
        self._mark, self._over = mark, False  # over once it was waited for
        self.source: int | None = None
        self.tag: int | None = None

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._over or self.request.done()

    def wait(self) -> ResultT:
        """Return the buffer once it is filled, or may be used again."""
        if not self._over:
            with self._mark:
                self.request.wait()
            self._take()
            self._over = True
        return cast(ResultT, self._bound.given)

    def _take(self) -> None:
        """Nothing comes of what was sent."""


class _ReceivedMessage(Message[ResultT]):
    def _take(self) -> None:
        """Look at what came, and bring it to the buffer."""
        self.source, self.tag, nbytes, dtype = self.request.status()
        packed = self._keep
        if nbytes != packed.nbytes or dtype != self._bound.dtype:
            count = nbytes // max(1, _item(dtype))
            raise CollectiveMismatch(
                f"recv on rank {self._rank} from rank {self.source}, tag {self.tag}: the "
                f"buffer is {self._bound.dtype}[{packed.size}], but the message is "
                f"{dtype}[{count}]. The message was taken and dropped."
            )
        if packed is not self._bound.array:
            self._bound.array[...] = packed
        self._bound.touched()


class Exchange(Generic[ResultT]):
    """A send and a receive under way together."""

    def __init__(self, sent: Message[Any], received: Message[ResultT]) -> None:
        self._sent, self._received = sent, received

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._sent.done() and self._received.done()

    def wait(self) -> ResultT:
        """Return the buffer that was filled, once the other may be used again, too."""
        result = self._received.wait()
        self._sent.wait()
        return result


class PointToPoint(ABC):
    """The part of a communicator that sends and receives."""

    rank: int
    size: int
    _engine: Engine

    def send(self, x: Buffer, dst: int, tag: int = 0) -> None:
        """Send `x`; returns when it may be used again, which may be before it has arrived."""
        self._post(x, dst, tag, sends=True, background=False).wait()

    def recv(self, x: BufferT, src: Wanted, tag: Wanted = 0) -> BufferT:
        """Fill `x` with the next message from `src` with this tag; either may be `rd.ANY`."""
        return self._post(x, src, tag, sends=False, background=False).wait()

    def sendrecv(
        self,
        x: Buffer,
        dst: int,
        into: BufferT,
        src: Wanted,
        *,
        tag: int = 0,
        recv_tag: Wanted | None = None,
    ) -> BufferT:
        """Send `x` to `dst` and fill `into` from `src` at the same time; both may be one buffer."""
        expected = tag if recv_tag is None else recv_tag
        return self._exchange(x, dst, tag, into, src, expected, background=False).wait()

    def _exchange(
        self,
        x: Buffer,
        dst: Any,
        tag: Any,
        into: BufferT,
        src: Any,
        recv_tag: Any,
        *,
        background: bool,
        inner: bool = False,
    ) -> Exchange[BufferT]:
        given, filled = bind("send", x), bind("recv", into)
        send = self._ready(
            given, dst, tag, sends=True, background=background, inner=inner, written=filled.array
        )
        receive = self._ready(
            filled, src, recv_tag, sends=False, background=background, inner=inner
        )
        sent = send()  # both are right, so neither goes without the other
        return Exchange(sent, receive())

    def _post(
        self,
        x: BufferT,
        other: Any,
        tag: Any,
        *,
        sends: bool,
        background: bool = True,
        inner: bool = False,
    ) -> Message[BufferT]:
        """Begin a message; an inner one is part of a larger whole, and not for `rd.ANY`."""
        bound = bind("send" if sends else "recv", x)
        return self._ready(bound, other, tag, sends=sends, background=background, inner=inner)()

    def _ready(
        self,
        bound: Bound,
        other: Any,
        tag: Any,
        *,
        sends: bool,
        background: bool,
        inner: bool = False,
        written: Memory = None,
    ) -> Callable[[], Message[Any]]:
        """Return what posts a message, once all that was asked for has been found right.

        What is sent is what is there now, also where that lies in memory `written` meanwhile.
        """
        call = "send" if sends else "recv"
        if not self._engine.devices:
            require_host(call, (bound.array,))
        if not sends:
            bound.require_writable(call, "buffer")
        data = bound.array if bound.array.flags.c_contiguous else contiguous(bound.array)
        if written is not None:
            data = apart(data, written)
        rank = None if other is ANY and not sends else self._checked(call, other)
        number = None if tag is ANY and not sends else _tag(call, tag)
        if inner and number is not None:
            number += INNER_TAGS
        kind = Message if sends else _ReceivedMessage

        def post() -> Message[Any]:
            call = MessageCall(data.reshape(-1), bound.dtype, rank, number, sends, background)
            trace = self._engine.tracer
            mark = NOT_TRACED if trace is None else MessageMark(trace, call)
            return kind(self.rank, self._engine.post(call), bound, data, mark)

        return post

    def _checked(self, call: str, rank: Any) -> int:
        number = index_of(rank)
        if number is None or not 0 <= number < self.size:
            ways = "" if call == "send" else ", or rd.ANY"
            raise InvalidArgumentError(
                f"{call} on {rank_count(self.size)} has no rank {shown(rank)}; ranks go from 0 to "
                f"{self.size - 1}{ways}."
            )
        return number


def _tag(call: str, tag: Any) -> int:
    number = index_of(tag)
    if number is None or not 0 <= number < INNER_TAGS:
        ways = "" if call == "send" else ", or rd.ANY"
        raise InvalidArgumentError(
            f"{call} takes whole numbers from 0 to 2**62 - 1 as tag{ways}, not {shown(tag)}."
        )
    return number


def _item(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
