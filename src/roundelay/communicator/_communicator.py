"""The communicator: every collective on every kind of array, through one object per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from roundelay.arguments import index_of
from roundelay.arguments import seconds as read_seconds
from roundelay.communicator.buffers import Bound, bind, fresh, plain_shape, unseen
from roundelay.communicator.custom_ops import CustomOps
from roundelay.communicator.groups import Groups, not_over
from roundelay.communicator.memory import require_host
from roundelay.communicator.objects import ObjectCalls
from roundelay.communicator.start import Handle, Start
from roundelay.engines import AXIS, COLLECTIVES, CollectiveCall, Engine
from roundelay.errors import InvalidArgumentError, rank_count
from roundelay.reductions import DTYPES, OPS, Array, Op, reduction

__all__ = ["Communicator", "Traffic"]

ALL_REDUCE, REDUCE, SCAN, EXSCAN, REDUCE_SCATTER = (
    COLLECTIVES[name] for name in ("all_reduce", "reduce", "scan", "exscan", "reduce_scatter")
)
BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, BARRIER = (
    COLLECTIVES[name]
    for name in ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier")
)
MOVED, MET = OPS["sum"], OPS["max"]  # what calls say that reduce nothing
NOTHING = np.empty(0, np.uint8)
Shape: TypeAlias = tuple[int, ...]


class Traffic(NamedTuple):
    """Bytes that one rank has exchanged with the others."""

    sent: int
    received: int


class Communicator(Groups, ObjectCalls):
    """A group of ranks that call the same collectives in the same order.

    Buffers are numpy arrays, CPU tensors, or anything with the buffer protocol or DLPack; results
    are of the kind that came in. Calls that go wrong raise on every rank and break the group.

    Plain calls on arrays and CPU tensors take the fast path; what that refuses becomes a call.
    """

    #: Spent in collectives so far, but for those on the fast path; work, and waiting for others.
    seconds = 0.0
    _asking: Array | int = 0  # bytes that asking for traffic cost, by rank

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.rank, self.size = engine.rank, engine.size
        self._fast_path = engine.fast_path
        self._goodbyes: list[Callable[[], None]] = []
        self._objects_sent = count()

    @cached_property
    def start(self) -> Start:
        """The collectives, each in the background: `comm.start.all_reduce(x)`."""
        return Start(self)

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}>"

    @property
    def timeout(self) -> float:
        """Seconds without progress after which a call gives up on a rank."""
        return self._engine.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._engine.timeout = read_seconds("timeout", seconds)

    # ---- collectives

    def all_reduce(
        self, x: Any, op: str | Op = "sum", *, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Reduce `x` over all ranks, in place, and return it; `out=` leaves `x` alone."""
        result = x if out is None else _beside(x, out)
        if algorithm is None and self._fast_path(ALL_REDUCE, x, result, _code(op), 0):
            return result
        if isinstance(op, Op):
            return CustomOps(self).all_reduce(x, op, out)
        return self._now(self._build.all_reduce(x, _named(op), out), algorithm)

    def reduce(
        self,
        x: Any,
        op: str | Op = "sum",
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Reduce `x` to the root, in place there; None elsewhere, where `x` stays as it is."""
        result = x if out is None else _beside(x, out)
        if type(root) is not int or not 0 <= root < self.size:
            root = self._build.check_root("reduce", root)
        if algorithm is None and self._fast_path(REDUCE, x, result, _code(op), root):
            return result if self.rank == root else None
        if isinstance(op, Op):
            return CustomOps(self).reduce(x, op, root, out)
        return self._now(self._build.reduce(x, _named(op), root, out), algorithm)

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str | None = None) -> Any:
        """Fill `x` on every rank with the root's, and return it."""
        if type(root) is not int or not 0 <= root < self.size:
            root = self._build.check_root("broadcast", root)
        if algorithm is None and self._fast_path(BROADCAST, x, x, MOVED, root):
            return x
        return self._now(self._build.broadcast(x, root), algorithm)

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        axis: int | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
    ) -> Any:
        """Stack everybody's `x` to (size, *shape); with axis=0 concatenate, `counts` rows each."""
        if counts is None and algorithm is None and (shape := plain_shape(x)) is not None:
            result = _fitting(x, out, _stacked(shape, self.size, axis))
            if self._fast_path(ALL_GATHER, x, result, MOVED, 0 if axis is None else AXIS):
                return result
        return self._now(self._build.all_gather(x, out, axis, counts), algorithm)

    def gather(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        axis: int | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
    ) -> Any:
        """Stack everybody's `x` at the root; None elsewhere."""
        if type(root) is not int or not 0 <= root < self.size:
            root = self._build.check_root("gather", root)
        if counts is None and algorithm is None and (shape := plain_shape(x)) is not None:
            stacked = _stacked(shape, self.size, axis)
            result = _fitting(x, out, stacked) if self.rank == root else None
            if self._fast_path(GATHER, x, result, MOVED, root if axis is None else root | AXIS):
                return result
        call = self._build.all_gather(x, out, axis, counts, name="gather", root=root)
        return self._now(call, algorithm)

    def scatter(
        self, x: Any, root: int = 0, *, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Hand row r of the root's `x`, which is (size, …), to rank r; others may pass None.

        `out=` is given on every rank or on none. Without it the root first tells the others its
        dtype and shape.
        """
        root = self._build.check_root("scatter", root)
        mine = bind("scatter", x) if self.rank == root else None
        if out is None:
            shape, sample = self._scattered(mine, root)
        else:
            sample = bind("scatter", out)
            shape = sample.array.shape
        if algorithm is None and sample.dtype != "bfloat16":
            result = _fitting(sample.array, out, shape)
            given = None if mine is None else mine.array
            fits = given is None or given.shape == (self.size, *shape)
            if fits and self._fast_path(SCATTER, given, result, MOVED, root):
                return result if out is not None else sample.wrap(result)
        return self._now(self._build.scatter(x, root, shape, sample, out), algorithm)

    def _scattered(self, mine: Bound | None, root: int) -> tuple[Shape, Bound]:
        """Tell every rank what the root has: its dtype and shape."""
        if mine is not None and (mine.array.ndim == 0 or mine.array.shape[0] != self.size):
            raise InvalidArgumentError(
                f"scatter on {rank_count(self.size)} needs x of shape ({self.size}, …) at the "
                f"root, not {mine.array.shape}."
            )
        row = () if mine is None else mine.array.shape[1:]
        # Three numbers travel with the flags themselves; more dimensions come after.
        head = np.array([0 if mine is None else mine.code << 8 | len(row), *row, 0, 0][:3])
        self._broadcast_for("scatter", head, root)
        code, length = divmod(int(head[0]), 256)
        shape = tuple(int(n) for n in head[1 : 1 + length])
        if length > len(shape):
            others = np.array(row[2:]) if mine is not None else np.empty(length - 2, np.int64)
            shape += tuple(int(n) for n in self._broadcast_for("scatter", others, root))
        return shape, unseen("scatter", DTYPES[code]) if mine is None else mine

    def reduce_scatter(
        self,
        x: Any,
        op: str | Op = "sum",
        *,
        out: Any = None,
        axis: int | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
    ) -> Any:
        """Reduce `x`, which is (size, …), and keep row r; with axis=0 a share of the rows."""
        if counts is None and algorithm is None and (shape := plain_shape(x)) is not None:
            result = _fitting(x, out, _share(shape, self.size, axis))
            if self._fast_path(REDUCE_SCATTER, x, result, _code(op), 0 if axis is None else AXIS):
                return result
        if isinstance(op, Op):
            return CustomOps(self).reduce_scatter(x, op, out, axis, counts)
        return self._now(self._build.reduce_scatter(x, _named(op), out, axis, counts), algorithm)

    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        axis: int | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
    ) -> Any:
        """Send row d of `x` to rank d; with axis=0 and `counts`, so many rows to each rank."""
        if counts is None and algorithm is None and (shape := plain_shape(x)) is not None:
            fits = out is not x and _share(shape, self.size, axis) is not None
            result = _fitting(x, out, shape if fits else None)
            if self._fast_path(ALL_TO_ALL, x, result, MOVED, 0 if axis is None else AXIS):
                return result
        matrix = None
        if counts is not None:
            if index_of(axis) != 0:
                raise InvalidArgumentError("all_to_all with counts= needs axis=0.")
            counts = self._build.check_counts("all_to_all", counts)
            rows = bind("all_to_all", x).array.shape[:1]
            if rows != (sum(counts),):
                raise InvalidArgumentError(
                    f"all_to_all: counts {list(counts)} do not add up to the {rows} rows of x."
                )
            matrix = self._all_gather_for("all_to_all", np.array(counts, np.int64)).tolist()
        return self._now(self._build.all_to_all(x, out, axis, matrix), algorithm)

    def scan(
        self, x: Any, op: str | Op = "sum", *, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Reduce `x` over ranks 0 to this one, in place."""
        result = x if out is None else _beside(x, out)
        if algorithm is None and self._fast_path(SCAN, x, result, _part_code(op), 0):
            return result
        if isinstance(op, Op):
            return CustomOps(self).scan(x, op, out, inclusive=True)
        return self._now(self._build.all_reduce(x, _named(op), out, name="scan"), algorithm)

    def exscan(
        self, x: Any, op: str | Op = "sum", *, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Reduce `x` over the ranks below this one, in place; rank 0's stays as it is."""
        result = x if out is None else _beside(x, out)
        if algorithm is None and self._fast_path(EXSCAN, x, result, _part_code(op), 0):
            return result
        if isinstance(op, Op):
            return CustomOps(self).scan(x, op, out, inclusive=False)
        return self._now(self._build.all_reduce(x, _named(op), out, name="exscan"), algorithm)

    def barrier(self, *, algorithm: str | None = None) -> None:
        """Return when every rank has called it."""
        if algorithm is None and self._fast_path(BARRIER, NOTHING, NOTHING, MET, 0):
            return
        self._now(self._build.barrier(), algorithm)

    def traffic(self) -> list[Traffic] | None:
        """Return what every rank has sent and received so far, as counted, not as predicted.

        Every rank calls it. None where the engine does not count: on other libraries' transports.
        """
        before = self._engine.moved()
        if before is None:
            return None
        mine = np.array(before, np.int64)
        taken, given = self._all_gather_for("traffic", mine - self._asking).swapaxes(0, 1)
        self._asking = self._asking + np.array(self._engine.moved(), np.int64) - mine
        return [
            Traffic(int(given[rank].sum() + taken[:, rank].sum()),
                    int(taken[rank].sum() + given[:, rank].sum()))
            for rank in range(self.size)
        ]  # fmt: skip

    def before_close(self, action: Callable[[], None]) -> None:
        """Have `action` called when this communicator, or one it was made from, closes."""
        level: Communicator | None = self
        while level is not None:
            level._goodbyes = [*filter(not_over, level._goodbyes), action]
            level = level._parent

    def close(self) -> None:
        """Make no more calls, and raise `CollectiveMismatch` if the ranks did not make the same.

        Waits for what was begun. The communicator of all ranks also waits for all of them to
        close, but no longer than `timeout`. A group waits for nobody: the last rank to close it
        compares.
        """
        self.end("closed", together=True)

    def end(self, how: str, *, together: bool) -> None:
        """Close, by one of `ENDINGS`; without `together` wait for no other rank."""
        try:
            while self._goodbyes:
                self._goodbyes.pop()()
        finally:  # whatever is raised, all of it is done
            try:
                self._engine.end_calls(how, together=self._parent is None and together)
            finally:
                try:
                    self._engine.close()
                finally:
                    self._fast_path = (
                        self._engine.fast_path
                    )  # which now refuses; the long way can say why

    # ---- parts of other calls, which are compared and told as those

    def _all_gather_for(self, part_of: str, x: Any, counts: Sequence[int] | None = None) -> Any:
        axis = None if counts is None else 0
        return self._now(replace(self._build.all_gather(x, None, axis, counts), part_of=part_of))

    def _gather_for(self, part_of: str, x: Any, root: int, counts: Sequence[int]) -> Any:
        call = self._build.all_gather(x, None, 0, counts, name="gather", root=root)
        return self._now(replace(call, part_of=part_of))

    def _broadcast_for(self, part_of: str, x: Any, root: int) -> Any:
        return self._now(replace(self._build.broadcast(x, root), part_of=part_of))

    # ---- how a call runs

    def _now(self, call: CollectiveCall, algorithm: str | None = None) -> Any:  # the caller's kind
        if not self._engine.devices:
            require_host(call.collective, (call.input, call.output))
        began = perf_counter()
        self._engine.run(call, algorithm)
        self.seconds += perf_counter() - began
        return call.finish()

    def _later(self, call: CollectiveCall, algorithm: str | None) -> Handle:
        if not self._engine.devices:
            require_host(call.collective, (call.input, call.output))
        return Handle(self, self._engine.begin(call, algorithm), call.finish)


def _named(op: str | Op) -> str:
    return reduction(op).name


def _code(op: object) -> int:
    """Return the number of a built-in reduction; -1 for others, which take the long way."""
    return OPS.get(op, -1) if type(op) is str else -1


def _part_code(op: object) -> int:
    """Return it for reductions over a part of the ranks, which have no mean."""
    return OPS.get(op, -1) if type(op) is str and op != "avg" else -1


def _beside(x: Any, out: Any) -> Any:
    """Return where a plain result goes beside a plain `x`; None where the long way must look."""
    if type(x) is np.ndarray and type(out) is np.ndarray:
        return out if x.shape == out.shape else None
    shape = plain_shape(x)
    return out if shape is not None and shape == plain_shape(out) else None


def _stacked(shape: Shape, size: int, axis: int | None) -> Shape | None:
    """Return the shape of all ranks' blocks together; None where there is none."""
    if axis is None:
        return (size, *shape)
    return (size * shape[0], *shape[1:]) if type(axis) is int and axis == 0 and shape else None


def _share(shape: Shape, size: int, axis: int | None) -> Shape | None:
    """Return the shape of one rank's share; None where there is none."""
    if axis is None and shape[:1] == (size,):
        return shape[1:]
    divides = type(axis) is int and axis == 0 and shape and not shape[0] % size
    return (shape[0] // size, *shape[1:]) if divides else None


def _fitting(x: Any, out: Any, shape: Shape | None) -> Any:
    """Return where a plain result goes; None where `out` is not plain, or does not fit."""
    if shape is None:
        return None
    if out is None:
        return fresh("the result", x, shape)
    return out if plain_shape(out) == shape else None
