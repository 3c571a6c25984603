"""What each collective call means in memory: which buffer goes in, which comes out, in what shape.

A `CollectiveCall` is built on every rank from what its caller passed. It knows nothing of when it
runs, so that at once and in the background are the same call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roundelay import _core
from roundelay.arguments import index_of, indices_of, shown
from roundelay.communicator.buffers import Bound, bind
from roundelay.communicator.memory import apart, contiguous, is_block, new, overlap, same
from roundelay.engines import CollectiveCall
from roundelay.errors import InvalidArgumentError, UnsupportedReductionError, rank_count
from roundelay.reductions import LOGICAL, REDUCTIONS, Array, Located, paired, reduction

__all__ = ["CallBuilder"]

LOCATING = ("maxloc", "minloc")


@dataclass(frozen=True, slots=True)
class CallBuilder:
    """Builds the calls of one rank."""

    rank: int
    size: int

    def all_reduce(self, x: Any, op: str, out: Any, *, name: str = "all_reduce") -> CollectiveCall:
        """Reduce in place, or into `out`; scan and exscan have the same shape."""
        if op in LOCATING:
            return self._located(name, x, op, out)
        source = bind(name, x)
        _check_op(name, op, source)
        target = _target(name, source, out, source.array.shape)
        data, deliver = _writable(name, target, or_out=out is None)
        if name == "exscan" and self.rank == 0:  # nothing comes to it
            deliver = target.unchanged
        given = data if out is None else contiguous(source.array)
        return self._as_logical(_make(name, source, source.array.size, deliver, given, data, op=op))

    def _as_logical(self, call: CollectiveCall) -> CollectiveCall:
        """Have logical reductions give 0 and 1 also of one contribution, which nobody folds."""
        first = 1 if call.collective == "exscan" else 0  # rank that gets anything
        lone = self.size == 1 or call.collective in ("scan", "exscan")
        output = call.output
        if lone and self.rank >= first and call.op in LOGICAL and isinstance(output, np.ndarray):
            deliver = call.finish

            def finish() -> Any:
                _core.fold("lor", call.dtype, [output], [output, output])
                return deliver()

            call.finish = finish
        return call

    def _located(self, name: str, x: Any, op: str, out: Any, root: int = 0) -> CollectiveCall:
        given = x if isinstance(x, Located) else Located(x, np.array(self.rank))
        source = bind(name, given.values)
        REDUCTIONS[op].check(source.dtype)
        if out is not None:
            raise InvalidArgumentError(
                f"{name} with op={op!r} returns values and locations, and takes no out=."
            )
        packed = paired(name, np.asarray(source.array), given.locations)  # of a device: by the host
        # What no rank writes, the first one's of an exscan, stays as it is.
        result = packed.copy() if name == "exscan" else np.empty_like(packed)

        def finish() -> Located:
            values = source.wrap(np.ascontiguousarray(result["value"]))
            return Located(values, np.ascontiguousarray(result["location"]))

        call = _make(name, source, packed.size, finish, packed, result, op=op, root=root)
        call.item, call.nbytes = packed.dtype.itemsize, packed.nbytes
        return call

    def reduce(self, x: Any, op: str, root: int, out: Any) -> CollectiveCall:
        """Reduce to the root, in place there or into `out`; nothing changes elsewhere."""
        root = self.check_root("reduce", root)
        if op in LOCATING:
            call = self._located("reduce", x, op, out, root)
            if self.rank != root:
                call.finish = _nothing
            return call
        source = bind("reduce", x)
        _check_op("reduce", op, source)
        numel = source.array.size
        if self.rank != root:
            given = contiguous(source.array)
            return _make("reduce", source, numel, _nothing, given, None, op=op, root=root)
        target = _target("reduce", source, out, source.array.shape)
        data, deliver = _writable("reduce", target, or_out=out is None)
        given = data if out is None else contiguous(source.array)
        return self._as_logical(
            _make("reduce", source, numel, deliver, given, data, op=op, root=root)
        )

    def broadcast(self, x: Any, root: int) -> CollectiveCall:
        """Fill everybody's buffer with the root's."""
        root = self.check_root("broadcast", root)
        source = bind("broadcast", x)
        numel = source.array.size
        if self.rank == root:
            data = contiguous(source.array)
            return _make("broadcast", source, numel, lambda: x, data, data, root=root)
        data, deliver = _writable("broadcast", source)
        return _make("broadcast", source, numel, deliver, None, data, root=root)

    def all_gather(
        self,
        x: Any,
        out: Any,
        axis: int | None,
        counts: Sequence[int] | None,
        *,
        name: str = "all_gather",
        root: int | None = None,
    ) -> CollectiveCall:
        """Stack, or with axis=0 concatenate, what all ranks bring; at the root only for gather."""
        if root is not None:
            root = self.check_root(name, root)
        source = bind(name, x)
        given = contiguous(source.array)
        shape, blocks = self._gathered(name, source, axis, counts)
        call = _make(name, source, given.size, _nothing, given, None, root=root or 0)
        call.axis = axis is not None
        call.counts, call.count = blocks, sum(blocks) if blocks else given.size
        call.nbytes = call.item * (call.count if blocks else given.size * self.size)
        if root is None or root == self.rank:
            block = None if blocks else self.rank
            target = _target(name, source, out, shape, fresh=True, block=block)
            call.output, call.finish = _writable(name, target)
            call.input = apart(given, call.output)
        return call

    def _gathered(
        self, name: str, source: Bound, axis: int | None, counts: Sequence[int] | None
    ) -> tuple[tuple[int, ...], list[int]]:
        shape = source.array.shape
        axis = _check_axis(name, axis, counts, shape)
        if axis is None:
            return (self.size, *shape), []
        if counts is None:
            return (self.size * shape[0], *shape[1:]), []
        counts = self.check_counts(name, counts)
        if shape[0] != counts[self.rank]:
            raise InvalidArgumentError(
                f"{name}: rank {self.rank} brings {shape[0]} rows, but counts[{self.rank}] is "
                f"{counts[self.rank]}."
            )
        row = math.prod(shape[1:])
        return (sum(counts), *shape[1:]), [count * row for count in counts]

    def scatter(
        self, x: Any, root: int, shape: tuple[int, ...], like_x: Bound, out: Any
    ) -> CollectiveCall:
        """Hand out the rows of the root's buffer; `shape` is what every rank gets."""
        target = _target("scatter", like_x, out, shape, fresh=True)
        data, deliver = _writable("scatter", target)
        given = None
        if self.rank == root:
            source = bind("scatter", x)
            if (source.dtype, source.array.shape) != (like_x.dtype, (self.size, *shape)):
                raise InvalidArgumentError(
                    f"scatter on {rank_count(self.size)} into {like_x.dtype}{list(shape)} needs x "
                    f"of {like_x.dtype}{[self.size, *shape]} at the root, not "
                    f"{source.dtype}{list(source.array.shape)}."
                )
            given = contiguous(source.array)
        call = _make("scatter", like_x, data.size, deliver, given, data, root=root)
        call.nbytes = data.nbytes * self.size
        return call

    def reduce_scatter(
        self, x: Any, op: str, out: Any, axis: int | None, counts: Sequence[int] | None
    ) -> CollectiveCall:
        """Reduce, and keep row r, or with axis=0 the r-th share of the rows."""
        name = "reduce_scatter"
        if op in LOCATING:
            raise UnsupportedReductionError(f"{name} takes arrays; use all_reduce for {op}.")
        source = bind(name, x)
        _check_op(name, op, source)
        shape, blocks = self.shared(name, source, axis, counts)
        block = None if blocks else self.rank
        target = _target(name, source, out, shape, fresh=True, block=block)
        data, deliver = _writable(name, target)
        given = apart(contiguous(source.array), data)
        call = _make(name, source, given.size // self.size, deliver, given, data, op=op)
        call.axis, call.counts, call.nbytes = axis is not None, blocks, given.nbytes
        return self._as_logical(call)

    def shared(
        self, name: str, source: Bound, axis: int | None, counts: Sequence[int] | None
    ) -> tuple[tuple[int, ...], list[int]]:
        """Return the shape and block lengths of the share that each rank gets."""
        shape = source.array.shape
        axis = _check_axis(name, axis, counts, shape)
        if counts is not None:
            counts = self.check_counts(name, counts)
            if not shape or sum(counts) != shape[0]:
                raise InvalidArgumentError(
                    f"{name}: counts {list(counts)} do not add up to the {shape[:1]} rows of x."
                )
            row = math.prod(shape[1:])
            return (counts[self.rank], *shape[1:]), [count * row for count in counts]
        rows = shape[0] if shape else 0
        if axis is None and rows == self.size:
            return shape[1:], []
        if axis == 0 and rows % self.size == 0:
            return (rows // self.size, *shape[1:]), []
        way = (
            "a first dimension equal to the number of ranks" if axis is None else "rows that divide"
        )
        raise InvalidArgumentError(
            f"{name} on {rank_count(self.size)} needs {way}, but x has shape {shape}. Pass axis=0 "
            f"with rows that divide by {self.size}, or axis=0 with counts=."
        )

    def all_to_all(
        self, x: Any, out: Any, axis: int | None, matrix: Sequence[Sequence[int]] | None
    ) -> CollectiveCall:
        """Send row d to rank d; with a matrix of counts, so many rows of mine to each."""
        name = "all_to_all"
        source = bind(name, x)
        given = contiguous(source.array)
        shape = source.array.shape
        blocks: list[int] = []
        if matrix is None:
            self.shared(name, source, axis, None)
        else:
            row = math.prod(shape[1:])
            shape = (sum(line[self.rank] for line in matrix), *shape[1:])
            blocks = [count * row for line in matrix for count in line]
        target = _target(name, source, out, shape, fresh=True)
        data, deliver = _writable(name, target)
        given = apart(given, data)
        call = _make(name, source, given.size // self.size, deliver, given, data)
        call.axis, call.counts, call.nbytes = axis is not None, blocks, call.item * given.size
        if blocks:  # told by all ranks alike, unlike what this one brings
            call.count, call.nbytes = sum(blocks), call.item * sum(blocks)
        return call

    def barrier(self) -> CollectiveCall:
        """Bring nothing, take nothing."""
        nothing = np.empty(0, np.uint8)
        return CollectiveCall("barrier", "uint8", 1, 0, 0, _nothing, nothing, nothing, op="max")

    def check_root(self, name: str, root: object) -> int:
        """Return the root; refuse one that is not one of the ranks."""
        number = index_of(root)
        if number is None or not 0 <= number < self.size:
            raise InvalidArgumentError(
                f"{name} on {rank_count(self.size)} has no root {shown(root)}; roots go from 0 to "
                f"{self.size - 1}."
            )
        return number

    def check_counts(self, name: str, counts: object) -> list[int]:
        """Return the counts; refuse what is not one whole number per rank."""
        numbers = indices_of(counts)
        if numbers is None or len(numbers) != self.size or min(numbers) < 0:
            raise InvalidArgumentError(
                f"{name} needs counts= of {self.size} whole numbers from 0, not {shown(counts)}."
            )
        return numbers

    def check_matrix(self, name: str, counts: object) -> list[list[int]]:
        """Return the counts of all ranks, a list for each; or this rank's, in a list alone."""
        if not isinstance(counts, list | tuple):
            return [self.check_counts(name, counts)]
        lines = [line for each in counts if (line := indices_of(each)) is not None]
        if len(lines) == len(counts) == self.size:
            for line in lines:
                if len(line) != self.size or min(line) < 0:
                    self.check_counts(name, line)  # which says so
            return lines
        return [self.check_counts(name, counts)]


def _make(
    name: str,
    source: Bound,
    count: int,
    finish: Callable[[], Any],
    given: Array | None,
    output: Array | None,
    *,
    op: str = "sum",
    root: int = 0,
) -> CollectiveCall:
    item = source.array.dtype.itemsize
    return CollectiveCall(
        name, source.dtype, item, count, count * item, finish, given, output, op=op, root=root
    )


def _nothing() -> None:
    """Return nothing: this rank gets no result."""


def _check_op(name: str, op: str, source: Bound) -> None:
    reduction(op).check(source.dtype)
    if op == "avg" and name in ("scan", "exscan"):
        raise UnsupportedReductionError(
            f"{name} has no avg: every rank's result has another number of contributions. "
            f"Use sum, and divide by the rank's own count."
        )


def _check_axis(
    name: str, axis: int | None, counts: Sequence[int] | None, shape: tuple[int, ...]
) -> int | None:
    """Return the axis, which is None or 0; refuse what does not go with it."""
    if axis is not None and index_of(axis) != 0:
        raise InvalidArgumentError(f"{name} takes axis=None (stack) or axis=0, not {shown(axis)}.")
    if counts is not None and axis is None:
        raise InvalidArgumentError(f"{name} with counts= concatenates: pass axis=0 with it.")
    if axis is not None and not shape:
        raise InvalidArgumentError(f"{name} with axis=0 needs at least one dimension.")
    return None if axis is None else 0


def _target(
    name: str,
    source: Bound,
    out: Any,
    shape: tuple[int, ...],
    *,
    fresh: bool = False,
    block: int | None = None,
) -> Bound:
    """Return where the result goes: `out`, new memory, or the source itself.

    With `block`, one of the two may be that block of the other.
    """
    if out is None:
        if not fresh:
            return source
        array = new(name, source.array, shape)
        return Bound(array, source.dtype, source.wrap, None, lambda: None)
    target = bind(name, out)
    if target.dtype != source.dtype or target.array.shape != shape:
        raise InvalidArgumentError(
            f"{name} gives {source.dtype}{list(shape)}, but out= is "
            f"{target.dtype}{list(target.array.shape)}."
        )
    x, result = source.array, target.array
    if (
        overlap(x, result)
        and not same(x, result)
        and (block is None or not (is_block(x, result, block) or is_block(result, x, block)))
    ):
        raise InvalidArgumentError(f"{name}: out= overlaps x in part. Pass separate memory.")
    return target


def _writable(name: str, target: Bound, *, or_out: bool = False) -> tuple[Array, Callable[[], Any]]:
    """Return contiguous memory for the result, and what brings it to the caller."""
    target.require_writable(name, "result", or_out=or_out)
    array = target.array
    if array.flags.c_contiguous:

        def hand_back() -> Any:
            target.touched()
            return target.given if target.given is not None else target.wrap(array)

        return array, hand_back
    packed = contiguous(array)

    def unpack() -> Any:
        array[...] = packed
        target.touched()
        return target.given

    return packed, unpack
