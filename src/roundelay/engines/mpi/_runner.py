"""Ranks as processes of MPI, started by mpirun; data goes through MPI's own messages."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import msgspec
import numpy as np

from roundelay.engines._base import Engine, Select
from roundelay.engines._harness import Harness, Part
from roundelay.engines.mpi._rank import WalkRequest
from roundelay.engines.mpi._ranks import MpiRanks
from roundelay.engines.mpi.engine import mpi_engine
from roundelay.errors import RankFailed
from roundelay.processes.reports import as_raised
from roundelay.processes.wire import decode, encode
from roundelay.reductions import Array, Op, fold, reduction
from roundelay.rendezvous.place import Place
from roundelay.rendezvous.store import OpenStore, no_store
from roundelay.schedule import Schedule, prove, to_json

__all__ = ["Mpi"]


class Mpi(Harness):
    """Runs a schedule on MPI ranks of this host, transfer by transfer, with MPI's send and receive.

    `mpirun` is called once for each number of ranks; the processes live on until `close()`, or the
    end of the engine object or of this process. A reduction of your own is not sent to them: they
    ask this process to fold.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, MpiRanks] = {}  # by size
        self._latest: dict[int, Schedule] = {}  # which they know
        self._endings: dict[int, weakref.finalize[[], Mpi]] = {}

    @classmethod
    def join(
        cls, place: Place, store: OpenStore = no_store, *, select: Select, timeout: float
    ) -> Engine:
        """Join all ranks that mpirun started."""
        del place, store
        return mpi_engine(lambda size: select(size, cores=0).schedule_for, timeout)

    def outputs(
        self, schedule: Schedule, parts: Sequence[Part], op: Op | None
    ) -> Sequence[Array | None]:
        """Ask the ranks; mpirun starts them if there are none."""
        ranks = self._started(schedule.size)
        text = ""
        if self._latest.get(schedule.size) is not schedule:
            prove(schedule)  # or ranks might wait for what nobody sends
            text = to_json(schedule)
        try:
            for part, channel in zip(parts, ranks.channels, strict=True):
                array = np.empty(0, part.dtype) if part.array is None else part.array
                request = WalkRequest(
                    text, encode(np.ascontiguousarray(array)), part.array is not None, part.op,
                    op is not None, list(part.counts),
                )  # fmt: skip
                channel.send(msgspec.msgpack.encode(request))
            self._latest[schedule.size] = schedule
            by = reduction(op or parts[0].op)
            answers = ranks.answers(lambda operands: encode(fold(by, decode(operands))))
        except RankFailed as error:
            self._drop(schedule.size)
            raise as_raised(error) from None
        except BaseException:
            self._drop(schedule.size)
            raise
        return [decode(answer) for answer in answers]

    def close(self) -> None:
        """End the processes."""
        for size in list(self._ranks):
            self._endings.pop(size)()
            del self._ranks[size]
        self._latest.clear()

    def _started(self, size: int) -> MpiRanks:
        if size not in self._ranks:
            self._ranks[size] = ranks = MpiRanks(size)
            self._endings[size] = weakref.finalize(self, ranks.end)
        return self._ranks[size]

    def _drop(self, size: int) -> None:
        """End ranks that may be in the middle of a schedule."""
        self._endings.pop(size).detach()
        self._ranks.pop(size).end(at_once=True)
        self._latest.pop(size, None)
