"""Calls in the background: `comm.start.all_reduce(x)` gives a handle to wait on."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, cast

from roundelay._typing import Buffer, BufferT, ResultT
from roundelay.communicator.buffers import Bound
from roundelay.communicator.call_builder import CallBuilder
from roundelay.communicator.calls import ArrayCalls
from roundelay.communicator.fast_method import FUNCTIONS
from roundelay.communicator.point_to_point import Exchange, Message, Wanted
from roundelay.engines import CollectiveCall, Request
from roundelay.errors import InvalidArgumentError
from roundelay.reductions import Op

if TYPE_CHECKING:
    from roundelay.communicator._communicator import Communicator

__all__ = ["Handle", "Start"]

P = ParamSpec("P")
R = TypeVar("R")


class Handle(Generic[ResultT]):
    """A call under way. It owns its buffers: leave them alone until `wait` has returned."""

    def __init__(self, comm: Communicator, request: Request, finish: Callable[[], ResultT]) -> None:
        self._comm = comm
        self._request: Request | None = request  # None once it was waited for
        self._finish = finish
        self._result: ResultT | None = None
        self._times: tuple[float, float] | None = None

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._request is None or self._request.done()

    def wait(self) -> ResultT:
        """Return the result of the call, or raise what went wrong."""
        if self._request is not None:
            began = perf_counter()
            self._request.wait()
            self._comm.seconds += perf_counter() - began
            times = getattr(self._request, "times", None)  # only some engines note them
            self._times = None if times is None else times()
            self._result, self._request = self._finish(), None
        return cast(ResultT, self._result)  # which may itself be None

    def times(self) -> tuple[float, float] | None:
        """Return when the call began and ended, once it was waited for; None if nobody noted.

        In seconds of the monotonic clock. Calls run one after the other, so one that begins late
        has waited for those before.
        """
        return self._times


def in_background(
    call: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Start, P], Handle[R]]:
    """Return the function of a collective; what a `Start` runs gives a handle of its result."""
    return cast("Callable[Concatenate[Start, P], Handle[R]]", FUNCTIONS[call.__name__])


class Start:
    """The collectives of a communicator, each in the background and in the order of the calls."""

    _quick = False  # the fast path is for calls at once

    def __init__(self, comm: Communicator, build: CallBuilder) -> None:
        self._comm, self._build = comm, build
        self.rank, self.size = comm.rank, comm.size

    all_reduce = in_background(ArrayCalls.all_reduce)
    reduce = in_background(ArrayCalls.reduce)
    broadcast = in_background(ArrayCalls.broadcast)
    all_gather = in_background(ArrayCalls.all_gather)
    gather = in_background(ArrayCalls.gather)
    scatter = in_background(ArrayCalls.scatter)
    reduce_scatter = in_background(ArrayCalls.reduce_scatter)
    all_to_all = in_background(ArrayCalls.all_to_all)
    scan = in_background(ArrayCalls.scan)
    exscan = in_background(ArrayCalls.exscan)
    barrier = in_background(ArrayCalls.barrier)

    def send(self, x: BufferT, dst: int, tag: int = 0) -> Message[BufferT]:
        """Send `x`, which is not to be changed until that is done."""
        return self._comm._post(x, dst, tag, sends=True)

    def recv(self, x: BufferT, src: Wanted, tag: Wanted = 0) -> Message[BufferT]:
        """Fill `x` with the next message from `src` with this tag; either may be `rd.ANY`."""
        return self._comm._post(x, src, tag, sends=False)

    def sendrecv(
        self,
        x: Buffer,
        dst: int,
        into: BufferT,
        src: Wanted,
        *,
        tag: int = 0,
        recv_tag: Wanted | None = None,
        inner: bool = False,
    ) -> Exchange[BufferT]:
        """Send `x` to `dst` while `into` fills from `src`; leave both alone until that is done.

        Both may be one buffer.
        Inner messages are part of a larger whole: their tags are their own, and `rd.ANY` takes none
        of them.
        """
        expected = tag if recv_tag is None else recv_tag
        return self._comm._exchange(x, dst, tag, into, src, expected, background=True, inner=inner)

    # ---- what the collectives stand on

    def _run(self, call: CollectiveCall, algorithm: str | None = None) -> Handle:
        return self._comm._begin(call, algorithm)

    def _custom_ops(self, op: Op) -> NoReturn:
        del op
        raise InvalidArgumentError(
            "A reduction of your own runs in Python, so not in the background: call it without "
            "start."
        )

    def _scattered(self, mine: Bound | None, root: int) -> NoReturn:
        del mine, root
        raise InvalidArgumentError(
            "start.scatter needs out=: nobody waits there to be told the root's dtype and shape."
        )

    def _all_gather_for(self, part_of: str, *_: object) -> NoReturn:
        raise InvalidArgumentError(
            f"{part_of} with counts= first asks all ranks for theirs, so not in the background: "
            f"call it without start."
        )
