"""Calls in the background: `comm.start.all_reduce(x)` gives a handle to wait on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from roundelay.communicator.buffers import bind
from roundelay.engines import Request
from roundelay.errors import InvalidArgumentError
from roundelay.reductions import Op, reduction

if TYPE_CHECKING:
    from roundelay.communicator._communicator import Communicator

__all__ = ["Handle", "Start"]


class Handle:
    """A call under way. It owns its buffers: leave them alone until `wait` has returned."""

    def __init__(self, comm: Communicator, request: Request, finish: Callable[[], Any]) -> None:
        self._comm = comm
        self._request: Request | None = request  # None once it was waited for
        self._finish = finish
        self._result: Any = None
        self._times: tuple[float, float] | None = None

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._request is None or self._request.done()

    def wait(self) -> Any:
        """Return the result of the call, or raise what went wrong."""
        if self._request is not None:
            began = perf_counter()
            self._request.wait()
            self._comm.seconds += perf_counter() - began
            times = getattr(self._request, "times", None)  # only some engines note them
            self._times = None if times is None else times()
            self._result, self._request = self._finish(), None
        return self._result

    def times(self) -> tuple[float, float] | None:
        """Return when the call began and ended, once it was waited for; None if nobody noted.

        In seconds of the monotonic clock. Calls run one after the other, so one that begins late
        has waited for those before.
        """
        return self._times


class Start:
    """The collectives of a communicator, each in the background and in the order of the calls."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str | None = None
    ) -> Handle:
        """Begin an all-reduce."""
        return self._later(self._comm._build.all_reduce(x, _named(op), out), algorithm)

    def reduce(
        self,
        x: Any,
        op: str = "sum",
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Handle:
        """Begin a reduce."""
        return self._later(self._comm._build.reduce(x, _named(op), root, out), algorithm)

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str | None = None) -> Handle:
        """Begin a broadcast."""
        return self._later(self._comm._build.broadcast(x, root), algorithm)

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        axis: int | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        label: int = 0,
    ) -> Handle:
        """Begin an all-gather; ranks that give different labels have made different calls."""
        call = self._comm._build.all_gather(x, out, axis, counts)
        call.label = label
        return self._later(call, algorithm)

    def gather(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        axis: int | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
    ) -> Handle:
        """Begin a gather."""
        build = self._comm._build
        root = build.check_root("gather", root)
        call = build.all_gather(x, out, axis, counts, name="gather", root=root)
        return self._later(call, algorithm)

    def scatter(self, x: Any, root: int = 0, *, out: Any, algorithm: str | None = None) -> Handle:
        """Begin a scatter into `out`, which tells every rank the shape without asking the root."""
        build = self._comm._build
        root = build.check_root("scatter", root)
        bound = bind("scatter", out)
        return self._later(build.scatter(x, root, bound.array.shape, bound, out), algorithm)

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        axis: int | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
    ) -> Handle:
        """Begin a reduce-scatter."""
        call = self._comm._build.reduce_scatter(x, _named(op), out, axis, counts)
        return self._later(call, algorithm)

    def all_to_all(
        self, x: Any, *, out: Any = None, axis: int | None = None, algorithm: str | None = None
    ) -> Handle:
        """Begin an all-to-all."""
        return self._later(self._comm._build.all_to_all(x, out, axis, None), algorithm)

    def scan(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str | None = None
    ) -> Handle:
        """Begin a scan."""
        return self._later(self._comm._build.all_reduce(x, _named(op), out, name="scan"), algorithm)

    def exscan(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str | None = None
    ) -> Handle:
        """Begin an exclusive scan."""
        call = self._comm._build.all_reduce(x, _named(op), out, name="exscan")
        return self._later(call, algorithm)

    def barrier(self, *, algorithm: str | None = None) -> Handle:
        """Begin a barrier."""
        return self._later(self._comm._build.barrier(), algorithm)

    def send(self, x: Any, dst: int, tag: int = 0) -> Any:
        """Begin a send."""
        return self._comm._post(x, dst, tag, sends=True)

    def recv(self, x: Any, src: Any, tag: Any = 0) -> Any:
        """Begin a receive."""
        return self._comm._post(x, src, tag, sends=False)

    def _later(self, call: Any, algorithm: str | None) -> Handle:
        return self._comm._later(call, algorithm)


def _named(op: str | Op) -> str:
    if isinstance(op, Op):
        raise InvalidArgumentError(
            "A reduction of your own runs in Python, so not in the background: call it without "
            "start."
        )
    return reduction(op).name
