"""Ranks as processes of this host that share memory: the default engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import numpy as np

from roundelay import _core
from roundelay.engines._base import Buffer
from roundelay.engines._inputs import outgoing, prepare
from roundelay.engines._native.parts import (
    Part,
    call_native,
    common_dtype,
    fold_in_python,
    make_group,
)
from roundelay.errors import RankFailed
from roundelay.processes.channel import Channel
from roundelay.processes.children import Children
from roundelay.processes.reports import as_raised, collect, report
from roundelay.processes.wire import decode, encode
from roundelay.reductions import Op, reduction
from roundelay.schedule import Programs, Schedule, compile_schedule

__all__ = ["SharedMemory"]

END_S = 5.0  # for ranks that have answered to end by themselves
INTERRUPTED_S = 1.0


class SharedMemory:
    """Runs a schedule on the native core, one process per rank.

    The processes live on for as long as the same schedule is run. They end with `close()`, with
    the engine object, or with this process, however that ends.

    >>> from roundelay.algorithms import algorithms
    >>> ring = algorithms.load("all_reduce_ring").schedule(4)
    >>> with SharedMemory() as engine:
    ...     engine.run(ring, [np.array([r, r]) for r in (1, 2, 3, 4)])[0]
    array([10, 10])
    """

    def __init__(self) -> None:
        self._made_for: tuple[Schedule, Op | None] | None = None
        self._children: Children | None = None
        self._end: Callable[[], object] = _nothing

    def run(
        self,
        schedule: Schedule,
        inputs: Sequence[Buffer | None],
        *,
        op: str | Op = "sum",
        counts: Sequence[int] | None = None,
    ) -> list[Buffer | None]:
        """Return each rank's output, flat; None where the contract leaves a rank nothing."""
        made, arrays, layout = prepare(schedule, inputs, op=op, counts=counts)
        children = self._forked_for(schedule, op if isinstance(op, Op) else None)
        nothing = np.empty(0, common_dtype(arrays))  # also says the dtype
        try:
            for array, channel in zip(arrays, children.channels, strict=True):
                given = nothing if array is None else array
                channel.send(encode((array is None, given, made.name, layout.counts)))
            outputs = [decode(reply) for reply in collect(children)]
        except RankFailed as error:
            self.close()
            raise as_raised(error) from None
        except BaseException:
            self.close()
            raise
        return [None if output is None else outgoing(output) for output in outputs]

    @staticmethod
    def start(body: Callable[[_core.World, int], bytes], size: int) -> list[bytes]:
        """Run `body` on `size` new processes; return what each gave, in rank order.

        The first error of a rank is raised as `RankFailed`; the others are told, and have ended
        when it is. They also end when the thread that called this does.
        """

        def be_rank(world: _core.World, rank: int, channel: Channel) -> None:
            if not report(partial(body, world, rank), world, rank, channel):
                raise SystemExit(1)

        with Children(be_rank, size, tied=True) as children:
            try:
                results = collect(children)
            except KeyboardInterrupt:
                children.world.fail("interrupted", 0, "KeyboardInterrupt")
                children.end(grace=INTERRUPTED_S)
                raise
            children.end(grace=END_S)
            return results

    def close(self) -> None:
        """End the processes."""
        self._end()
        self._made_for, self._children, self._end = None, None, _nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forked_for(self, schedule: Schedule, op: Op | None) -> Children:
        """Return processes that know this schedule and this function: a fork carries both along."""
        now = self._made_for
        if self._children is not None and now and now[0] is schedule and now[1] is op:
            return self._children
        self.close()
        serve = _server(compile_schedule(schedule), op)
        children = Children(serve, schedule.size, tied=False)
        self._made_for, self._children = (schedule, op), children
        self._end = weakref.finalize(self, children.end)
        return children


def _server(programs: Programs, op: Op | None) -> Callable[[_core.World, int, Channel], None]:
    """Return what a rank does: run its part for every request, until there are no more."""

    def serve(world: _core.World, rank: int, channel: Channel) -> None:
        group = make_group(world, rank)

        def answer(request: bytes) -> bytes:
            absent, array, name, counts = decode(request)
            part = Part(None if absent else array, array.dtype, name, counts)
            if op is None:
                return encode(call_native(group, programs, rank, part))
            made = reduction(op)
            return encode(fold_in_python(world, group, programs.schedule, rank, part, made))

        while (request := channel.receive()) is not None:
            if not report(partial(answer, request), world, rank, channel):
                raise SystemExit(1)

    return serve


def _nothing() -> None:
    """No processes, nothing to end."""
