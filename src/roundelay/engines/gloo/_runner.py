"""Ranks as processes that Gloo connects, PyTorch's library for CPUs; on one host or on many."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from roundelay import _core
from roundelay.engines._base import Buffer, CollectiveCall, ScheduleFor
from roundelay.engines._inputs import outgoing, prepare
from roundelay.engines._native.parts import Part, common_dtype
from roundelay.engines._over_messages import OverMessages, Post, RankSchedule
from roundelay.engines.gloo.engine import GlooEngine
from roundelay.engines.gloo.groups import Schedules, load_torch
from roundelay.engines.shared_memory import SharedMemory
from roundelay.errors import InvalidArgumentError, RankFailed
from roundelay.processes.channel import Channel
from roundelay.processes.children import Children
from roundelay.processes.reports import as_raised, collect, report
from roundelay.processes.wire import decode, encode
from roundelay.reductions import Array, Op, fold
from roundelay.rendezvous.by_store import StoreRendezvous
from roundelay.rendezvous.store import open_store
from roundelay.schedule import Schedule, from_json, prove, to_json

__all__ = ["Gloo"]

TIMEOUT_S = 60.0
HERE = "127.0.0.1"


class Gloo:
    """Runs a schedule over Gloo's sends and receives, one process of this host per rank.

    The processes live on for as long as as many ranks are asked for. They end with `close()`, with
    the engine object, or with this process, however that ends.

    >>> from roundelay.algorithms import algorithms
    >>> ring = algorithms.load("all_reduce_ring").schedule(2)
    >>> with Gloo() as engine:
    ...     engine.run(ring, [np.array([r, r]) for r in (1, 2)])[0]
    array([3, 3])
    """

    def __init__(self) -> None:
        self._made_for: tuple[int, Op | None] | None = None
        self._known: Schedule | None = None  # what the ranks have been told
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
        self.check(schedule.size)
        children = self._forked_for(schedule.size, op if isinstance(op, Op) else None)
        nothing = np.empty(0, common_dtype(arrays))  # also says the dtype
        text = ""
        if schedule is not self._known:
            prove(schedule)  # or ranks might wait for what nobody sends
            text, self._known = to_json(schedule), schedule
        try:
            for array, channel in zip(arrays, children.channels, strict=True):
                given = nothing if array is None else array
                channel.send(encode((text, array is None, given, made.name, layout.counts)))
            outputs = [decode(reply) for reply in collect(children)]
        except RankFailed as error:
            self.close()
            raise as_raised(error) from None
        except BaseException:
            self.close()
            raise
        return [None if output is None else outgoing(output) for output in outputs]

    @staticmethod
    def start(body: Callable[[StoreRendezvous], bytes], size: int) -> list[bytes]:
        """Run `body` on `size` new processes of this host; return what each gave, in rank order."""
        torch = load_torch("gloo")
        with tempfile.TemporaryDirectory(prefix="roundelay-gloo-") as folder:
            return SharedMemory.start(
                lambda _, rank: body(_rendezvous(torch, folder, rank, size)), size
            )

    def check(self, size: int) -> None:
        """Refuse a number of ranks that can't be had here; processes can."""

    def connect(
        self, rendezvous: StoreRendezvous, schedules: Schedules, timeout: float
    ) -> tuple[GlooEngine, Post]:
        """Return the end of a rank, and what posts the transfers of its schedules."""
        engine = GlooEngine(rendezvous, schedules, timeout=timeout)
        return engine, engine.slot

    def close(self) -> None:
        """End the processes."""
        self._end()
        self._made_for, self._known, self._children, self._end = None, None, None, _nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forked_for(self, size: int, op: Op | None) -> Children:
        """Return so many processes that know this function: a fork carries it along."""
        if self._children is not None and self._made_for == (size, op):
            return self._children
        self.close()
        torch = load_torch("gloo")  # here, so that the children need not
        folder = tempfile.mkdtemp(prefix="roundelay-gloo-")
        serve = _server(self.connect, torch, folder, size, op)
        children = Children(serve, size, tied=False)
        self._made_for, self._children = (size, op), children
        self._end = weakref.finalize(self, _end, children, folder)
        return children


def _rendezvous(torch: Any, folder: str, rank: int, size: int) -> StoreRendezvous:
    path = str(Path(folder) / "store")
    make = partial(torch.distributed.FileStore, path, size)
    return StoreRendezvous(
        open_store(make, f"the store in {folder}", b"", TIMEOUT_S), rank, size, HERE
    )


def _end(children: Children, folder: str) -> None:
    children.end()
    shutil.rmtree(folder, ignore_errors=True)


def _server(
    connect: Callable[[StoreRendezvous, Schedules, float], tuple[GlooEngine, Post]],
    torch: Any,
    folder: str,
    size: int,
    op: Op | None,
) -> Callable[[_core.World, int, Channel], None]:
    """Return what a rank does: run its part for every request, until there are no more."""

    def serve(world: _core.World, rank: int, channel: Channel) -> None:
        engine, post = connect(_rendezvous(torch, folder, rank, size), _no_schedules, TIMEOUT_S)
        walk = OverMessages(rank, post)
        asked: list[Schedule] = []  # the latest one

        def answer(request: bytes) -> bytes:
            text, absent, array, name, counts = decode(request)
            if text:
                asked[:] = [from_json(text)]
            part = Part(None if absent else array, array.dtype, name, counts)
            if op is None:
                return encode(_walked(walk, asked[0], rank, part))
            route, made = RankSchedule.of(asked[0], rank), op.reduction
            found = route.walk(
                part.array, part.dtype, part.counts, lambda given, _: fold(made, given), post
            )
            return encode(np.concatenate(found) if found else None)

        while (request := channel.receive()) is not None:
            if not report(partial(answer, request), world, rank, channel):
                raise SystemExit(1)
        engine.close()

    return serve


def _no_schedules(size: int) -> ScheduleFor:
    def find(call: CollectiveCall, algorithm: str | None) -> Schedule:
        raise InvalidArgumentError(f"no {algorithm} for {call.collective} on {size} ranks was sent")

    return find


def _walked(walk: OverMessages, schedule: Schedule, rank: int, part: Part) -> Array | None:
    after = schedule.collective.after(schedule.size, schedule.root, rank)
    output = np.empty(sum(part.counts[block] for block in after), part.dtype) if after else None
    kind = part.dtype if part.dtype.names is None else part.dtype["value"]
    call = CollectiveCall(
        schedule.collective.name, kind.name, part.dtype.itemsize, 0, 0, _nothing,
        part.array, output, op=part.op, root=schedule.root, counts=part.counts,
    )  # fmt: skip
    walk.run(call, schedule)
    return output


def _nothing() -> None:
    """Do nothing: there is nothing to end."""
