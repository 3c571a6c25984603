"""What each collective call means in memory: which buffer goes in, which comes out, in what shape.

A job is made on every rank from what its caller passed and knows nothing of when it runs, so that a
call at once and a call in the background are the same job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roundelay.arguments import index_of, indices_of, shown
from roundelay.communicator.buffers import Bound, bind
from roundelay.communicator.memory import contiguous, is_block, new, overlap, same
from roundelay.engines._end import Job
from roundelay.errors import InvalidArgumentError, UnsupportedReductionError, rank_count
from roundelay.reductions import REDUCTIONS, Array, Located, paired, reduction

__all__ = ["Jobs"]

LOCATING = ("maxloc", "minloc")


@dataclass(frozen=True, slots=True)
class Jobs:
    """Makes the jobs of one rank."""

    rank: int
    size: int

    def all_reduce(self, x: Any, op: str, out: Any, *, call: str = "all_reduce") -> Job:
        """Reduce in place, or into `out`; scan and exscan have the same shape."""
        if op in LOCATING:
            return self._located(call, x, op, out)
        source = bind(call, x)
        _check_op(call, op, source)
        target = _target(call, source, out, source.array.shape)
        data, deliver = _writable(call, target)
        given = data if out is None else contiguous(source.array)
        return _job(call, source, source.array.size, deliver, given, data, op=op)

    def _located(self, call: str, x: Any, op: str, out: Any, root: int = 0) -> Job:
        given = x if isinstance(x, Located) else Located(x, np.array(self.rank))
        source = bind(call, given.values)
        REDUCTIONS[op].check(source.dtype)
        if out is not None:
            raise InvalidArgumentError(
                f"{call} with op={op!r} returns values and locations, and takes no out=."
            )
        packed = paired(call, np.asarray(source.array), given.locations)  # of a device: by the host
        result = np.empty_like(packed)

        def finish() -> Located:
            made = source.wrap(np.ascontiguousarray(result["value"]))
            return Located(made, np.ascontiguousarray(result["location"]))

        job = _job(call, source, packed.size, finish, packed, result, op=op, root=root)
        job.item, job.nbytes = packed.dtype.itemsize, packed.nbytes
        return job

    def reduce(self, x: Any, op: str, root: int, out: Any) -> Job:
        """Reduce to the root, in place there or into `out`; nothing changes elsewhere."""
        root = self.check_root("reduce", root)
        if op in LOCATING:
            job = self._located("reduce", x, op, out, root)
            if self.rank != root:
                job.finish = _nothing
            return job
        source = bind("reduce", x)
        _check_op("reduce", op, source)
        numel = source.array.size
        if self.rank != root:
            given = contiguous(source.array)
            return _job("reduce", source, numel, _nothing, given, None, op=op, root=root)
        target = _target("reduce", source, out, source.array.shape)
        data, deliver = _writable("reduce", target)
        given = data if out is None else contiguous(source.array)
        return _job("reduce", source, numel, deliver, given, data, op=op, root=root)

    def broadcast(self, x: Any, root: int) -> Job:
        """Fill everybody's buffer with the root's."""
        root = self.check_root("broadcast", root)
        source = bind("broadcast", x)
        numel = source.array.size
        if self.rank == root:
            data = contiguous(source.array)
            return _job("broadcast", source, numel, lambda: x, data, data, root=root)
        data, deliver = _writable("broadcast", source)
        return _job("broadcast", source, numel, deliver, None, data, root=root)

    def all_gather(
        self,
        x: Any,
        out: Any,
        axis: int | None,
        counts: Sequence[int] | None,
        *,
        call: str = "all_gather",
        root: int | None = None,
    ) -> Job:
        """Stack, or with axis=0 concatenate, what all ranks bring; at the root only for gather."""
        if root is not None:
            root = self.check_root(call, root)
        source = bind(call, x)
        given = contiguous(source.array)
        shape, blocks = self._gathered(call, source, axis, counts)
        job = _job(call, source, given.size, _nothing, given, None, root=root or 0)
        job.axis = axis is not None
        job.counts, job.count = blocks, sum(blocks) if blocks else given.size
        job.nbytes = job.item * (job.count if blocks else given.size * self.size)
        if root is None or root == self.rank:
            block = None if blocks else self.rank
            target = _target(call, source, out, shape, fresh=True, block=block)
            job.output, job.finish = _writable(call, target)
            job.input = _apart(given, job.output)
        return job

    def _gathered(
        self, call: str, source: Bound, axis: int | None, counts: Sequence[int] | None
    ) -> tuple[tuple[int, ...], list[int]]:
        shape = source.array.shape
        axis = _check_axis(call, axis, counts, shape)
        if axis is None:
            return (self.size, *shape), []
        if counts is None:
            return (self.size * shape[0], *shape[1:]), []
        counts = self.check_counts(call, counts)
        if shape[0] != counts[self.rank]:
            raise InvalidArgumentError(
                f"{call}: rank {self.rank} brings {shape[0]} rows, but counts[{self.rank}] is "
                f"{counts[self.rank]}."
            )
        row = math.prod(shape[1:])
        return (sum(counts), *shape[1:]), [count * row for count in counts]

    def scatter(self, x: Any, root: int, shape: tuple[int, ...], like_x: Bound, out: Any) -> Job:
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
        job = _job("scatter", like_x, data.size, deliver, given, data, root=root)
        job.nbytes = data.nbytes * self.size
        return job

    def reduce_scatter(
        self, x: Any, op: str, out: Any, axis: int | None, counts: Sequence[int] | None
    ) -> Job:
        """Reduce, and keep row r, or with axis=0 the r-th share of the rows."""
        call = "reduce_scatter"
        if op in LOCATING:
            raise UnsupportedReductionError(f"{call} takes arrays; use all_reduce for {op}.")
        source = bind(call, x)
        _check_op(call, op, source)
        shape, blocks = self.shared(call, source, axis, counts)
        block = None if blocks else self.rank
        target = _target(call, source, out, shape, fresh=True, block=block)
        data, deliver = _writable(call, target)
        given = _apart(contiguous(source.array), data)
        job = _job(call, source, given.size // self.size, deliver, given, data, op=op)
        job.axis, job.counts, job.nbytes = axis is not None, blocks, given.nbytes
        return job

    def shared(
        self, call: str, source: Bound, axis: int | None, counts: Sequence[int] | None
    ) -> tuple[tuple[int, ...], list[int]]:
        """Return the shape and block lengths of the share that each rank gets."""
        shape = source.array.shape
        axis = _check_axis(call, axis, counts, shape)
        if counts is not None:
            counts = self.check_counts(call, counts)
            if not shape or sum(counts) != shape[0]:
                raise InvalidArgumentError(
                    f"{call}: counts {list(counts)} do not add up to the {shape[:1]} rows of x."
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
            f"{call} on {rank_count(self.size)} needs {way}, but x has shape {shape}. Pass axis=0 "
            f"with rows that divide by {self.size}, or axis=0 with counts=."
        )

    def all_to_all(
        self, x: Any, out: Any, axis: int | None, matrix: Sequence[Sequence[int]] | None
    ) -> Job:
        """Send row d to rank d; with a matrix of counts, so many rows of mine to each."""
        call = "all_to_all"
        source = bind(call, x)
        given = contiguous(source.array)
        shape = source.array.shape
        blocks: list[int] = []
        if matrix is None:
            self.shared(call, source, axis, None)
        else:
            row = math.prod(shape[1:])
            shape = (sum(line[self.rank] for line in matrix), *shape[1:])
            blocks = [count * row for line in matrix for count in line]
        target = _target(call, source, out, shape, fresh=True)
        data, deliver = _writable(call, target)
        given = _apart(given, data)
        job = _job(call, source, given.size // self.size, deliver, given, data)
        job.axis, job.counts, job.nbytes = axis is not None, blocks, job.item * given.size
        if blocks:  # told by all ranks alike, unlike what this one brings
            job.count, job.nbytes = sum(blocks), job.item * sum(blocks)
        return job

    def barrier(self) -> Job:
        """Bring nothing, take nothing."""
        nothing = np.empty(0, np.uint8)
        return Job("barrier", "uint8", 1, 0, 0, _nothing, nothing, nothing, op="max")

    def check_root(self, call: str, root: object) -> int:
        """Return the root; refuse one that is not one of the ranks."""
        number = index_of(root)
        if number is None or not 0 <= number < self.size:
            raise InvalidArgumentError(
                f"{call} on {rank_count(self.size)} has no root {shown(root)}; roots go from 0 to "
                f"{self.size - 1}."
            )
        return number

    def check_counts(self, call: str, counts: object) -> list[int]:
        """Return the counts; refuse what is not one whole number per rank."""
        numbers = indices_of(counts)
        if numbers is None or len(numbers) != self.size or min(numbers) < 0:
            raise InvalidArgumentError(
                f"{call} needs counts= of {self.size} whole numbers from 0, not {shown(counts)}."
            )
        return numbers


def _job(
    call: str,
    source: Bound,
    count: int,
    finish: Callable[[], Any],
    given: Array | None,
    output: Array | None,
    *,
    op: str = "sum",
    root: int = 0,
) -> Job:
    item = source.array.dtype.itemsize
    return Job(
        call, source.dtype, item, count, count * item, finish, given, output, op=op, root=root
    )


def _nothing() -> None:
    """Return nothing: this rank gets no result."""


def _check_op(call: str, op: str, source: Bound) -> None:
    made = reduction(op)
    made.check(source.dtype)
    if op == "avg" and call in ("scan", "exscan"):
        raise UnsupportedReductionError(
            f"{call} has no avg: every rank's result has another number of contributions. "
            f"Use sum, and divide by the rank's own count."
        )


def _check_axis(
    call: str, axis: int | None, counts: Sequence[int] | None, shape: tuple[int, ...]
) -> int | None:
    """Return the axis, which is None or 0; refuse what does not go with it."""
    if axis is not None and index_of(axis) != 0:
        raise InvalidArgumentError(f"{call} takes axis=None (stack) or axis=0, not {shown(axis)}.")
    if counts is not None and axis is None:
        raise InvalidArgumentError(f"{call} with counts= concatenates: pass axis=0 with it.")
    if axis is not None and not shape:
        raise InvalidArgumentError(f"{call} with axis=0 needs at least one dimension.")
    return None if axis is None else 0


def _target(
    call: str,
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
        array = new(call, source.array, shape)
        return Bound(array, source.dtype, source.wrap, None, lambda: None)
    target = bind(call, out)
    if target.dtype != source.dtype or target.array.shape != shape:
        raise InvalidArgumentError(
            f"{call} gives {source.dtype}{list(shape)}, but out= is "
            f"{target.dtype}{list(target.array.shape)}."
        )
    one, two = source.array, target.array
    if overlap(one, two) and not (
        same(one, two)
        or (block is not None and (is_block(one, two, block) or is_block(two, one, block)))
    ):
        raise InvalidArgumentError(f"{call}: out= overlaps x in part. Pass separate memory.")
    return target


def _apart(given: Array, result: Array) -> Array:
    """Return the input in memory that the result is not written to."""
    return given.copy() if overlap(given, result) else given


def _writable(call: str, target: Bound) -> tuple[Array, Callable[[], Any]]:
    """Return contiguous memory for the result, and what brings it to the caller."""
    target.require_writable(call, "result")
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
