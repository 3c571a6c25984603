"""Ranks as processes of MPI, started by mpirun; data goes through MPI's own messages."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np

from roundelay.engines._base import Buffer
from roundelay.engines._inputs import outgoing, prepare
from roundelay.engines._native.parts import common_dtype
from roundelay.engines.mpi._rank import Request
from roundelay.engines.mpi._ranks import MpiRanks
from roundelay.errors import RankFailed
from roundelay.processes.reports import as_raised
from roundelay.processes.wire import decode, encode
from roundelay.reductions import Op, Reduction, fold
from roundelay.schedule import Schedule, prove, to_json

__all__ = ["Mpi"]


class Mpi:
    """Runs a schedule on MPI ranks of this host, transfer by transfer, with MPI's send and receive.

    `mpirun` is called once for each number of ranks; the processes live on until `close()`, or the
    end of the engine object or of this process. A reduction of your own is not sent to them: they
    ask this process to fold.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, MpiRanks] = {}  # by size
        self._latest: dict[int, Schedule] = {}  # which they know
        self._endings: dict[int, weakref.finalize[[], Mpi]] = {}

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
        ranks = self._started(schedule.size)
        text = ""
        if self._latest.get(schedule.size) is not schedule:
            prove(schedule)  # or ranks might wait for what nobody sends
            text = to_json(schedule)
        nothing = np.empty(0, common_dtype(arrays))
        try:
            for array, channel in zip(arrays, ranks.channels, strict=True):
                request = Request(
                    text,
                    encode(nothing if array is None else np.ascontiguousarray(array)),
                    array is not None,
                    made.name,
                    isinstance(op, Op),
                    list(layout.counts),
                )
                channel.send(msgspec.msgpack.encode(request))
            self._latest[schedule.size] = schedule
            answers = ranks.answers(lambda operands: _folded(made, operands))
        except RankFailed as error:
            self._drop(schedule.size)
            raise as_raised(error) from None
        except BaseException:
            self._drop(schedule.size)
            raise
        outputs = [decode(answer) for answer in answers]
        return [None if output is None else outgoing(output) for output in outputs]

    def close(self) -> None:
        """End the processes."""
        for size in list(self._ranks):
            self._endings.pop(size)()
            del self._ranks[size]
        self._latest.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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


def _folded(made: Reduction, operands: bytes) -> bytes:
    return encode(fold(made, decode(operands)))
