"""Schedules on ranks that are forks of this process, and are asked again and again."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np

from roundelay import _core
from roundelay.engines._harness import Harness, Part
from roundelay.errors import RankFailed
from roundelay.processes.channel import Channel
from roundelay.processes.children import Children
from roundelay.processes.reports import as_raised, collect, report
from roundelay.processes.wire import decode, encode
from roundelay.reductions import Array, Op
from roundelay.schedule import Schedule

__all__ = ["Answer", "ForkedHarness", "Serve"]

#: Runs one part of a schedule, which is given as JSON where ranks do not know it yet.
Answer = Callable[[str, Part], Array | None]
#: What a rank is, for as long as it is asked.
Serve = Callable[[_core.World, int], AbstractContextManager[Answer]]


class _Forked(NamedTuple):
    key: object
    children: Children
    end: Callable[[], object]
    kept: object  # so that nothing else has the ids of its key


class ForkedHarness(Harness):
    """Ranks that are forks of this process, and live on for as long as they can be asked again.

    They end with `close()`, with this object, or with this process, however that ends.
    """

    _forked: _Forked | None = None

    @abstractmethod
    def serve(self, schedule: Schedule, op: Op | None, until_closed: ExitStack) -> Serve:
        """Return what a fork does that carries along what it must know."""

    def key(self, schedule: Schedule, op: Op | None) -> object:
        """Return for what ranks are forked: those of another key are ended first."""
        return id(schedule), id(op)

    def text(self, schedule: Schedule) -> str:
        """Return the schedule as JSON, if ranks must be told."""
        del schedule
        return ""

    def outputs(
        self, schedule: Schedule, parts: Sequence[Part], op: Op | None
    ) -> Sequence[Array | None]:
        """Ask the ranks; they are forked anew if they know too little."""
        children = self._children(schedule, op)
        text = self.text(schedule)
        try:
            for part, channel in zip(parts, children.channels, strict=True):
                array = np.empty(0, part.dtype) if part.array is None else part.array
                channel.send(encode((text, part.array is None, array, part.op, part.counts)))
            return [decode(reply) for reply in collect(children)]
        except RankFailed as error:
            self.close()
            raise as_raised(error) from None
        except BaseException:
            self.close()
            raise

    def _children(self, schedule: Schedule, op: Op | None) -> Children:
        key = self.key(schedule, op)
        if self._forked is not None and self._forked.key == key:
            return self._forked.children
        self.close()
        with ExitStack() as stack:
            serve = self.serve(schedule, op, stack)
            children = Children(partial(_serve, serve), schedule.size, tied=False)
            stack.callback(children.end)
            end = weakref.finalize(self, stack.pop_all().close)
        self._forked = _Forked(key, children, end, (schedule, op))
        return children

    def close(self) -> None:
        """End the processes."""
        if self._forked is not None:
            forked, self._forked = self._forked, None
            forked.end()


def _serve(serve: Serve, world: _core.World, rank: int, channel: Channel) -> None:
    """Be a rank until there are no more requests."""

    def answered(request: bytes) -> bytes:
        text, absent, array, op, counts = decode(request)
        return encode(answer(text, Part(None if absent else array, array.dtype, op, counts)))

    with serve(world, rank) as answer:
        while (request := channel.receive()) is not None:
            if not report(partial(answered, request), world, rank, channel):
                raise SystemExit(1)
