"""Gloo from outside: ranks that are forks of this process, and those that a launcher started."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from roundelay import _core
from roundelay.engines._base import CollectiveCall, Engine, ScheduleFor, Select
from roundelay.engines._forked import Answer, ForkedHarness, Serve
from roundelay.engines._harness import Part
from roundelay.engines._over_messages import OverMessages, Post, RankSchedule
from roundelay.engines.gloo.engine import GlooEngine
from roundelay.engines.gloo.groups import Schedules, load_torch
from roundelay.errors import InvalidArgumentError
from roundelay.processes.reports import run_forked
from roundelay.reductions import Array, Op, fold
from roundelay.rendezvous.by_store import StoreRendezvous, rendezvous_at
from roundelay.rendezvous.place import Place
from roundelay.rendezvous.store import OpenStore, no_store, open_store
from roundelay.schedule import Schedule, from_json, prove, to_json

__all__ = ["Gloo", "fork_at"]

TIMEOUT_S = 60.0
HERE = "127.0.0.1"


class Gloo(ForkedHarness):
    """Runs a schedule over Gloo's sends and receives, one process of this host per rank.

    The processes live on for as long as as many ranks are asked for.

    >>> from roundelay.algorithms import algorithms
    >>> ring = algorithms.load("all_reduce_ring").schedule(2)
    >>> with Gloo() as engine:
    ...     engine.run(ring, [np.array([r, r]) for r in (1, 2)])[0]
    array([3, 3])
    """

    engine: type[GlooEngine] = GlooEngine

    def __init__(self) -> None:
        self._told: Schedule | None = None  # what the ranks know

    @classmethod
    def start(
        cls, size: int, body: Callable[[Engine], Any], *, select: Select, timeout: float
    ) -> list[Any]:
        """Fork the ranks, and have Gloo connect them."""

        def be_rank(at: StoreRendezvous) -> bytes:
            engine = GlooEngine(at, _schedules(select), timeout=timeout)
            try:
                result: bytes = body(engine)
            except BaseException as error:
                engine.fail("failed", f"{type(error).__name__}: {error}")
                raise
            return result

        return fork_at(size, be_rank)

    @classmethod
    def join(
        cls, place: Place, store: OpenStore = no_store, *, select: Select, timeout: float
    ) -> Engine:
        """Connect the ranks by the store of their job."""
        name = cls.__name__.lower()
        if place.by == "mpi":
            raise InvalidArgumentError(
                f"mpirun started these ranks, but the engine {name} needs torch's store. Start "
                f"with `roundelay run` or torchrun, or use engine='mpi'."
            )
        several = place.by == "store"
        at = rendezvous_at(store(), place.rank, place.job.size, several_hosts=several)
        return cls.engine(at.within(name), _schedules(select), timeout=timeout)

    def check(self, size: int) -> None:
        """Refuse a number of ranks that can't be had here; processes can."""

    def connect(
        self, rendezvous: StoreRendezvous, schedules: Schedules, timeout: float
    ) -> tuple[GlooEngine, Post]:
        """Return the engine of a rank, and what posts the transfers of its schedules."""
        engine = GlooEngine(rendezvous, schedules, timeout=timeout)
        return engine, engine.slot

    def key(self, schedule: Schedule, op: Op | None) -> object:
        """Keep ranks for any schedule on as many of them."""
        return schedule.size, op

    def text(self, schedule: Schedule) -> str:
        """Tell the ranks of a schedule once, if it is proved."""
        if schedule is self._told:
            return ""
        prove(schedule)  # or ranks might wait for what nobody sends
        self._told = schedule
        return to_json(schedule)

    def close(self) -> None:
        """End the processes."""
        super().close()
        self._told = None

    def serve(self, schedule: Schedule, op: Op | None, until_closed: ExitStack) -> Serve:
        """Load torch here, so that the forks need not."""
        size = schedule.size
        self.check(size)
        torch = load_torch("gloo")
        folder = tempfile.mkdtemp(prefix="roundelay-gloo-")
        until_closed.callback(shutil.rmtree, folder, ignore_errors=True)
        connect = self.connect

        @contextmanager
        def be_rank(_: _core.World, rank: int) -> Iterator[Answer]:
            engine, post = connect(_in_folder(torch, folder, rank, size), _no_schedules, TIMEOUT_S)
            walk, asked = OverMessages(rank, post), list[Schedule]()  # the latest one

            def answer(text: str, part: Part) -> Array | None:
                if text:
                    asked[:] = [from_json(text)]
                if op is None:
                    return _walked(walk, asked[0], rank, part)
                chunks = RankSchedule.of(asked[0], rank).walk(
                    part.array, part.dtype, part.counts, lambda x, _: fold(op.reduction, x), post
                )
                return np.concatenate(chunks) if chunks else None

            yield answer
            engine.close()

        return be_rank


def fork_at(size: int, body: Callable[[StoreRendezvous], bytes]) -> list[bytes]:
    """Run `body` on `size` new processes of this host, which find one another in a folder."""
    torch = load_torch("gloo")
    with tempfile.TemporaryDirectory(prefix="roundelay-gloo-") as folder:
        return run_forked(size, lambda _, rank: body(_in_folder(torch, folder, rank, size)))


def _in_folder(torch: Any, folder: str, rank: int, size: int) -> StoreRendezvous:
    make = partial(torch.distributed.FileStore, str(Path(folder) / "store"), size)
    store = open_store(make, f"the store in {folder}", b"", TIMEOUT_S)
    return StoreRendezvous(store, rank, size, HERE)


def _schedules(select: Select) -> Schedules:
    return lambda size: select(size, cores=0).schedule_for


def _no_schedules(size: int) -> ScheduleFor:
    def find(call: CollectiveCall, algorithm: str | None) -> Schedule:
        raise InvalidArgumentError(f"no {algorithm} for {call.collective} on {size} ranks was sent")

    return find


def _walked(walk: OverMessages, schedule: Schedule, rank: int, part: Part) -> Array | None:
    after = schedule.collective.after(schedule.size, schedule.root, rank)
    output = np.empty(sum(part.counts[block] for block in after), part.dtype) if after else None
    kind = part.dtype if part.dtype.names is None else part.dtype["value"]
    call = CollectiveCall(
        schedule.collective.name, kind.name, part.dtype.itemsize, 0, 0, lambda: None,
        part.array, output, op=part.op, root=schedule.root, counts=part.counts,
    )  # fmt: skip
    walk.run(call, schedule)
    return output
