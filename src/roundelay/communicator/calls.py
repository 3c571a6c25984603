"""Every collective as callers see it: at once, or in the background.

The same functions are the methods of a communicator and of its `start`: these differ in how a call
runs once it is built. Plain calls on arrays and CPU tensors take the fast path, all of it in the
native core where their result is there already; what that refuses becomes a call.
"""

# What a call gives is made at run time, of the kind that came in.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from roundelay._typing import ArrayT, Buffer, BufferT, Shape
from roundelay.arguments import index_of
from roundelay.communicator.buffers import Bound, bind, fresh, plain_shape, unseen
from roundelay.communicator.call_builder import CallBuilder
from roundelay.communicator.custom_ops import CustomOps
from roundelay.communicator.fast_method import fast
from roundelay.communicator.wire import on_wire, require_built_in
from roundelay.engines import AXIS, COLLECTIVES, CollectiveCall, FastPath
from roundelay.errors import InvalidArgumentError, rank_count
from roundelay.reductions import DTYPES, LOGICAL, OPS, Located, Op, reduction

__all__ = ["ArrayCalls"]

ALL_REDUCE, REDUCE, SCAN, EXSCAN, REDUCE_SCATTER = (
    COLLECTIVES[name] for name in ("all_reduce", "reduce", "scan", "exscan", "reduce_scatter")
)
BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, BARRIER = (
    COLLECTIVES[name]
    for name in ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier")
)
MOVED, MET = OPS["sum"], OPS["max"]  # what calls say that reduce nothing
#: Over a part of the ranks there is no mean, and a lone one's numbers stay as they are.
PART_OPS = {name: code for name, code in OPS.items() if name not in ("avg", *LOGICAL)}
NO_AXIS = AXIS >> 1  # of a call that is refused
NOTHING = np.empty(0, np.uint8)
#: Reductions that give values and where they were.
Locating: TypeAlias = Literal["maxloc", "minloc"]


class ArrayCalls(ABC):
    """The collectives of one rank."""

    rank: int
    size: int
    _fast_path: FastPath
    _quick: bool  # whether the fast path takes anything

    @cached_property
    def _build(self) -> CallBuilder:
        return CallBuilder(self.rank, self.size)

    @abstractmethod
    def _run(self, call: CollectiveCall, algorithm: str | None = None) -> Any:
        """Run a call, or begin it; return what the caller gets, of whichever kind."""

    @abstractmethod
    def _custom_ops(self, op: Op) -> CustomOps:
        """Return what folds by a reduction of the user's own."""

    @overload
    def all_reduce(self, x: Buffer, op: Locating, *, algorithm: str | None = None) -> Located: ...
    @overload
    def all_reduce(
        self, x: BufferT, op: str | Op = "sum", *, out: BufferT | None = None,
        algorithm: str | None = None, wire: str | None = None,
    ) -> BufferT: ...  # fmt: skip
    @fast(ALL_REDUCE, ops=OPS, in_place=True)
    def all_reduce(
        self,
        x: Any,
        op: str | Op = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        wire: str | None = None,
    ) -> Any:
        """Reduce `x` over all ranks, in place, and return it; `out=` leaves `x` alone.

        With wire="bf16" float32 travels as bfloat16, in half the bytes, and is rounded on its way.
        """
        if isinstance(op, Op):
            require_built_in("all_reduce", op, wire)
            return self._custom_ops(op).all_reduce(x, op, out)
        call = self._build.all_reduce(x, _named(op), out)
        return self._run(on_wire(call, wire), algorithm)

    @overload
    def reduce(
        self, x: Buffer, op: Locating, root: int = 0, *, algorithm: str | None = None
    ) -> Located | None: ...
    @overload
    def reduce(
        self, x: BufferT, op: str | Op = "sum", root: int = 0, *, out: BufferT | None = None,
        algorithm: str | None = None,
    ) -> BufferT | None: ...  # fmt: skip
    @fast(REDUCE, ops=OPS, in_place=True, result_at_root=True)
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
        root = self._build.check_root("reduce", root)
        if isinstance(op, Op):
            return self._custom_ops(op).reduce(x, op, root, out)
        return self._run(self._build.reduce(x, _named(op), root, out), algorithm)

    @fast(BROADCAST, in_place=True)
    def broadcast(self, x: BufferT, root: int = 0, *, algorithm: str | None = None) -> BufferT:
        """Fill `x` on every rank with the root's, and return it."""
        root = self._build.check_root("broadcast", root)
        return self._run(self._build.broadcast(x, root), algorithm)

    @fast(ALL_GATHER, axis_bit=AXIS)
    def all_gather(
        self,
        x: ArrayT,
        *,
        out: ArrayT | None = None,
        axis: int | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        label: int = 0,
        wire: str | None = None,
    ) -> ArrayT:
        """Stack everybody's `x` to (size, *shape); with axis=0 concatenate, `counts` rows each.

        Ranks that give different labels have made different calls. With wire="bf16" every float32
        comes rounded to bfloat16, also a rank's own.
        """
        plain = counts is None and algorithm is None and not label and wire is None
        if plain and out is None and self._quick:
            result = _fresh(x, _stacked, self.size, axis)
            if self._fast_path(ALL_GATHER, x, result, MOVED, _word(axis)):
                return result
        call = self._build.all_gather(x, out, axis, counts)
        call = on_wire(call, wire)
        call.label = label
        return self._run(call, algorithm)

    @fast(GATHER, axis_bit=AXIS, result_at_root=True)
    def gather(
        self,
        x: ArrayT,
        root: int = 0,
        *,
        out: ArrayT | None = None,
        axis: int | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
    ) -> ArrayT | None:
        """Stack everybody's `x` at the root; None elsewhere."""
        root = self._build.check_root("gather", root)
        plain = counts is None and algorithm is None
        if plain and out is None and self.rank == root and self._quick:
            result = _fresh(x, _stacked, self.size, axis)
            if self._fast_path(GATHER, x, result, MOVED, root | _word(axis)):
                return result
        call = self._build.all_gather(x, out, axis, counts, name="gather", root=root)
        return self._run(call, algorithm)

    @fast(SCATTER, given_at_root=True)
    def scatter(
        self,
        x: ArrayT | None,
        root: int = 0,
        *,
        out: ArrayT | None = None,
        algorithm: str | None = None,
    ) -> ArrayT:
        """Hand row r of the root's `x`, which is (size, …), to rank r; others may pass None.

        `out=` is given on every rank or on none. Without it the root first tells the others its
        dtype and shape.
        """
        root = self._build.check_root("scatter", root)
        mine = bind("scatter", x) if self.rank == root else None
        shape: Shape
        if out is None:
            shape, sample = self._scattered(mine, root)
        else:
            sample = bind("scatter", out)
            shape = sample.array.shape
        if out is None and algorithm is None and sample.dtype != "bfloat16" and self._quick:
            result = fresh("the result", sample.array, shape)
            given = None if mine is None else mine.array
            if self._fast_path(SCATTER, given, result, MOVED, root):
                return sample.wrap(result)
        return self._run(self._build.scatter(x, root, shape, sample, out), algorithm)

    @fast(REDUCE_SCATTER, ops=OPS, axis_bit=AXIS)
    def reduce_scatter(
        self,
        x: ArrayT,
        op: str | Op = "sum",
        *,
        out: ArrayT | None = None,
        axis: int | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        wire: str | None = None,
    ) -> ArrayT:
        """Reduce `x`, which is (size, …), and keep row r; with axis=0 a share of the rows.

        With wire="bf16" float32 travels as bfloat16, and the sum is rounded to that, too.
        """
        plain = counts is None and algorithm is None and wire is None
        if plain and out is None and self._quick:
            result = _fresh(x, _share, self.size, axis)
            if self._fast_path(REDUCE_SCATTER, x, result, _code(op), _word(axis)):
                return result
        if isinstance(op, Op):
            require_built_in("reduce_scatter", op, wire)
            return self._custom_ops(op).reduce_scatter(x, op, out, axis, counts)
        call = self._build.reduce_scatter(x, _named(op), out, axis, counts)
        return self._run(on_wire(call, wire), algorithm)

    @fast(ALL_TO_ALL, axis_bit=AXIS)
    def all_to_all(
        self,
        x: ArrayT,
        *,
        out: ArrayT | None = None,
        axis: int | None = None,
        counts: Sequence[int] | Sequence[Sequence[int]] | None = None,
        algorithm: str | None = None,
    ) -> ArrayT:
        """Send row d of `x` to rank d; with axis=0 and `counts`, so many rows to each rank.

        `counts` of all ranks, a list for each, where every rank knows them: then none is asked.
        """
        if counts is None and algorithm is None and out is None and self._quick:
            result = _fresh(x, _shared, self.size, axis)
            if self._fast_path(ALL_TO_ALL, x, result, MOVED, _word(axis)):
                return result
        matrix = None
        if counts is not None:
            if index_of(axis) != 0:
                raise InvalidArgumentError("all_to_all with counts= needs axis=0.")
            matrix = self._build.check_matrix("all_to_all", counts)
            mine = matrix[self.rank] if len(matrix) > 1 else matrix[0]
            shape = plain_shape(x)
            rows = (bind("all_to_all", x).array.shape if shape is None else shape)[:1]
            if rows != (sum(mine),):
                raise InvalidArgumentError(
                    f"all_to_all: counts {mine} do not add up to the {rows} rows of x."
                )
            if len(matrix) < self.size:
                matrix = self._all_gather_for("all_to_all", np.array(mine, np.int64)).tolist()
        return self._run(self._build.all_to_all(x, out, axis, matrix), algorithm)

    @overload
    def scan(self, x: Buffer, op: Locating, *, algorithm: str | None = None) -> Located: ...
    @overload
    def scan(
        self, x: BufferT, op: str | Op = "sum", *, out: BufferT | None = None,
        algorithm: str | None = None,
    ) -> BufferT: ...  # fmt: skip
    @fast(SCAN, ops=PART_OPS, in_place=True)
    def scan(
        self, x: Any, op: str | Op = "sum", *, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Reduce `x` over ranks 0 to this one, in place."""
        if isinstance(op, Op):
            return self._custom_ops(op).scan(x, op, out, inclusive=True)
        return self._run(self._build.all_reduce(x, _named(op), out, name="scan"), algorithm)

    @overload
    def exscan(self, x: Buffer, op: Locating, *, algorithm: str | None = None) -> Located: ...
    @overload
    def exscan(
        self, x: BufferT, op: str | Op = "sum", *, out: BufferT | None = None,
        algorithm: str | None = None,
    ) -> BufferT: ...  # fmt: skip
    @fast(EXSCAN, ops=PART_OPS, in_place=True)
    def exscan(
        self, x: Any, op: str | Op = "sum", *, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Reduce `x` over the ranks below this one, in place; rank 0's stays as it is."""
        if isinstance(op, Op):
            return self._custom_ops(op).scan(x, op, out, inclusive=False)
        return self._run(self._build.all_reduce(x, _named(op), out, name="exscan"), algorithm)

    @fast(BARRIER, op=MET, in_place=True, nothing=NOTHING)
    def barrier(self, *, algorithm: str | None = None) -> None:
        """Return when every rank has called it."""
        return self._run(self._build.barrier(), algorithm)

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

    # ---- parts of other calls, which are compared and told as those

    def _all_gather_for(self, part_of: str, x: Any, counts: Sequence[int] | None = None) -> Any:
        axis = None if counts is None else 0
        return self._run(replace(self._build.all_gather(x, None, axis, counts), part_of=part_of))

    def _gather_for(self, part_of: str, x: Any, root: int, counts: Sequence[int]) -> Any:
        call = self._build.all_gather(x, None, 0, counts, name="gather", root=root)
        return self._run(replace(call, part_of=part_of))

    def _broadcast_for(self, part_of: str, x: Any, root: int) -> Any:
        return self._run(replace(self._build.broadcast(x, root), part_of=part_of))


def _named(op: str | Op) -> str:
    return reduction(op).name


def _code(op: object) -> int:
    """Return the number of a built-in reduction; -1 for others, which take the long way."""
    return OPS.get(op, -1) if type(op) is str else -1


def _word(axis: int | None) -> int:
    """Return what tells calls along an axis from others; a wrong one is told on the long way."""
    return 0 if axis is None else AXIS if type(axis) is int and axis == 0 else NO_AXIS


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


def _shared(shape: Shape, size: int, axis: int | None) -> Shape | None:
    """Return the same shape, of which every rank has a share; None where it has none."""
    return None if _share(shape, size, axis) is None else shape


def _fresh(
    x: Any, shape_of: Callable[[Shape, int, int | None], Shape | None], size: int, axis: int | None
) -> Any:
    """Return memory for the result of a plain `x`; None where the long way must look."""
    shape = plain_shape(x)
    wanted = None if shape is None else shape_of(shape, size, axis)
    return None if wanted is None else fresh("the result", x, wanted)
