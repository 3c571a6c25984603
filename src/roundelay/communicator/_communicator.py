"""The communicator: every collective on every kind of array, through one object per rank."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roundelay import _core
from roundelay.communicator.buffers import DTYPES, Bound, bind, unseen
from roundelay.communicator.groups import Groups
from roundelay.communicator.jobs import OPS, Job, Jobs
from roundelay.communicator.mail import Mail
from roundelay.communicator.objects import ObjectCalls
from roundelay.communicator.own_ops import OwnOps
from roundelay.communicator.plans import Plans
from roundelay.communicator.start import Handle, Start
from roundelay.communicator.trouble import explain, say_slow
from roundelay.errors import InvalidArgumentError
from roundelay.reductions import Op, reduction
from roundelay.tuning import Tuning, default_for

__all__ = ["Communicator"]

# Source lines in errors are the caller's, never ours.
_core.set_package(str(Path(__file__).parent.parent) + "/")


class Communicator(Mail, Groups, ObjectCalls):
    """A group of ranks that call the same collectives in the same order.

    Buffers are numpy arrays, CPU tensors, or anything with the buffer protocol or DLPack; results
    are of the kind that came in. Calls that go wrong raise on every rank and break the group.
    """

    def __init__(
        self,
        world: _core.World,
        rank: int,
        *,
        tuning: Tuning | None = None,
        timeout: float = 60.0,
        _ranks: Sequence[int] | None = None,
        _block: _core.Block | None = None,
        _parent: Communicator | None = None,
        _mail_group: int = 0,
    ) -> None:
        self._world = world
        self._ranks = list(range(world.size)) if _ranks is None else list(_ranks)
        self.rank, self.size = rank, len(self._ranks)
        self._group: _core.Group | None = _core.Group(
            world,
            0 if _block is None else _block.at,
            rank,
            self._ranks,
            on_slow=_slow_teller(self),
            parent=None if _parent is None else _parent._open(),
        )
        self._mailbox = (
            _core.Mailbox(world, self._ranks[rank]) if _parent is None else _parent._mailbox
        )
        self._mail_group = _mail_group
        self._whole = _parent is None
        self._block = _block  # the group's own memory, which goes back with the last rank
        self._jobs = Jobs(rank, self.size)
        self._plans = Plans(rank, self.size, tuning or default_for(self.size))
        self.timeout = timeout
        self.start = Start(self)
        self._own_ops = OwnOps(self)
        self._group.set_all_reduce(*self._plans.all_reduce_ladder())
        self._at_once: Callable[[Any, int], bool] = self._group.all_reduce

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}>"

    @property
    def timeout(self) -> float:
        """Seconds without progress after which a call gives up on a rank."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        if not seconds > 0:
            raise InvalidArgumentError(f"A timeout is a positive number of seconds, not {seconds}.")
        self._timeout = float(seconds)
        self._open().set_timeout(self._timeout)

    # ---- collectives

    def all_reduce(
        self, x: Any, op: str | Op = "sum", *, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Reduce `x` over all ranks, in place, and return it; `out=` leaves `x` alone."""
        if out is None and algorithm is None and isinstance(op, str):
            try:
                # Plain arrays need no Python from here on.
                if self._at_once(x, OPS.get(op, -1)):
                    return x
            except _core.Broken:
                raise explain(self) from None
        if isinstance(op, Op):
            return self._own_ops.all_reduce(x, op, out)
        return self._now(self._jobs.all_reduce(x, _named(op), out), algorithm)

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
        if isinstance(op, Op):
            return self._own_ops.reduce(x, op, root, out)
        return self._now(self._jobs.reduce(x, _named(op), root, out), algorithm)

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str | None = None) -> Any:
        """Fill `x` on every rank with the root's, and return it."""
        return self._now(self._jobs.broadcast(x, root), algorithm)

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
        return self._now(self._jobs.all_gather(x, out, axis, counts), algorithm)

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
        job = self._jobs.all_gather(x, out, axis, counts, call="gather", root=root)
        return self._now(job, algorithm)

    def scatter(
        self, x: Any, root: int = 0, *, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Hand row r of the root's `x`, which is (size, …), to rank r; others may pass None."""
        self._jobs.check_root("scatter", root)
        mine = bind("scatter", x) if self.rank == root else None
        shape, sample = self._scattered(mine, root, out)
        return self._now(self._jobs.scatter(x, root, shape, sample, out), algorithm)

    def _scattered(self, mine: Bound | None, root: int, out: Any) -> tuple[tuple[int, ...], Bound]:
        """Tell every rank what the root has: its dtype and shape."""
        if mine is not None and (mine.array.ndim == 0 or mine.array.shape[0] != self.size):
            raise InvalidArgumentError(
                f"scatter on {self.size} ranks needs x of shape ({self.size}, …) at the root, "
                f"not {mine.array.shape}."
            )
        head = np.zeros(18, np.int64)
        if mine is not None:
            row = mine.array.shape[1:]
            head[: 2 + len(row)] = [mine.code, len(row), *row]
        self.broadcast(head, root)
        shape = tuple(int(n) for n in head[2 : 2 + int(head[1])])
        name = DTYPES[int(head[0])]
        if mine is not None:
            return shape, mine
        if out is not None:
            return shape, bind("scatter", out)
        return shape, unseen("scatter", name)

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
        if isinstance(op, Op):
            return self._own_ops.reduce_scatter(x, op, out, axis, counts)
        return self._now(self._jobs.reduce_scatter(x, _named(op), out, axis, counts), algorithm)

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
        matrix = None
        if counts is not None:
            if axis != 0:
                raise InvalidArgumentError("all_to_all with counts= needs axis=0.")
            self._jobs.check_counts("all_to_all", counts)
            rows = bind("all_to_all", x).array.shape[:1]
            if rows != (sum(counts),):
                raise InvalidArgumentError(
                    f"all_to_all: counts {list(counts)} do not add up to the {rows} rows of x."
                )
            matrix = self.all_gather(np.array(counts, np.int64)).tolist()
        return self._now(self._jobs.all_to_all(x, out, axis, matrix), algorithm)

    def scan(
        self, x: Any, op: str | Op = "sum", *, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Reduce `x` over ranks 0 to this one, in place."""
        if isinstance(op, Op):
            return self._own_ops.scan(x, op, out, inclusive=True)
        return self._now(self._jobs.all_reduce(x, _named(op), out, call="scan"), algorithm)

    def exscan(
        self, x: Any, op: str | Op = "sum", *, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Reduce `x` over the ranks below this one, in place; rank 0's stays as it is."""
        if isinstance(op, Op):
            return self._own_ops.scan(x, op, out, inclusive=False)
        return self._now(self._jobs.all_reduce(x, _named(op), out, call="exscan"), algorithm)

    def barrier(self, *, algorithm: str | None = None) -> None:
        """Return when every rank has called it."""
        self._now(self._jobs.barrier(), algorithm)

    def close(self) -> None:
        """Say goodbye: others that still need this rank are told at once."""
        if self._group is None:
            return
        self._group = None
        self._at_once = self._closed
        self._block = None
        if self._whole:
            self._world.leave(self._ranks[self.rank])

    # ---- how a job runs

    def _closed(self, *_: object) -> bool:
        raise InvalidArgumentError("This communicator is closed.")

    def _open(self) -> _core.Group:
        if self._group is None:
            raise InvalidArgumentError("This communicator is closed.")
        return self._group

    def _now(self, job: Job, algorithm: str | None) -> Any:  # the caller's kind
        arguments = self._plans.arguments(job, algorithm)
        try:
            self._open().call(*arguments)
        except _core.Broken:
            raise explain(self) from None
        return job.finish()

    def _later(self, job: Job, algorithm: str | None) -> Handle:
        arguments = self._plans.arguments(job, algorithm)
        try:
            task = self._open().start(*arguments)
        except _core.Broken:
            raise explain(self) from None
        return Handle(self, task, job.finish, arguments)


def _slow_teller(comm: Communicator) -> Callable[[int, float], None]:
    # The native group must not keep its communicator alive.
    weak = weakref.ref(comm)

    def tell(rank: int, seconds: float) -> None:
        alive = weak()
        if alive is not None:
            sys.stderr.write(say_slow(alive, rank, seconds) + "\n")

    return tell


def _named(op: str | Op) -> str:
    return reduction(op).name
