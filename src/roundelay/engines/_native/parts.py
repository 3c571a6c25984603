"""One rank's part of a schedule, on the native core or, for a reduction of your own, in Python."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from roundelay import _core
from roundelay.engines._base import COLLECTIVES
from roundelay.engines._harness import Part
from roundelay.engines._native.encode import native_program
from roundelay.engines._over_messages import RankSchedule
from roundelay.reductions import CODES, OPS, Array, Reduction, fold
from roundelay.schedule import Programs, Schedule

__all__ = [
    "call_native",
    "fold_in_python",
    "make_group",
    "view",
]

TIMEOUT_S = 60.0
IN_FOREGROUND = False


def make_group(world: _core.World, rank: int) -> _core.Group:
    """Return the rank's end of the group of all ranks."""
    return _core.Group(world, None, rank, [], on_slow=_slow)


def call_native(group: _core.Group, programs: Programs, rank: int, part: Part) -> Array | None:
    """Run the rank's program; return its output, None where the contract leaves it nothing."""
    schedule = programs.schedule
    located = part.dtype.names is not None
    code = CODES[(part.dtype["value"] if located else part.dtype).name]
    after = schedule.collective.after(schedule.size, schedule.root, rank)
    output = np.empty(sum(part.counts[block] for block in after), part.dtype) if after else None
    even = len(set(part.counts)) == 1
    group.call(
        native_program(programs, rank),
        None,  # buffers are private, never in the arena
        None if part.array is None else view(np.ascontiguousarray(part.array)),
        None if output is None else view(output),
        COLLECTIVES[schedule.collective.name],
        0,
        schedule.root,
        code,
        OPS[part.op],
        part.dtype.itemsize,
        part.counts[0] if even else 0,
        [] if even else list(part.counts),
    )
    return output


def fold_in_python(
    world: _core.World,
    group: _core.Group,
    schedule: Schedule,
    rank: int,
    part: Part,
    made: Reduction,
) -> Array | None:
    """Walk the schedule over messages, and fold what arrives with a function of Python's."""
    messages = _core.PointToPoint(world, rank)

    def post(data: Array, other: int, *, sends: bool) -> _MessageRequest:
        view = _core.View(data)
        request = messages.post(sends, other, 0, 0, view, CODES["uint8"], IN_FOREGROUND)
        return _MessageRequest(messages, group, request)

    route = RankSchedule.of(schedule, rank)
    due = route.walk(part.array, part.dtype, part.counts, lambda given, _: fold(made, given), post)
    return np.concatenate(due) if due else None


@dataclass(frozen=True, slots=True)
class _MessageRequest:
    messages: _core.PointToPoint
    group: _core.Group
    request: _core.MessageRequest

    def done(self) -> bool:
        return self.request.done

    def wait(self) -> None:
        self.messages.wait(self.request, self.group, TIMEOUT_S, _slow)


def view(array: Array) -> _core.View:
    """Return the native view of contiguous memory; pairs and bfloat16 are bytes to it."""
    return _core.View(array.reshape(-1).view(np.uint8) if array.dtype.kind == "V" else array)


def _slow(rank: int, seconds: float) -> None:
    logging.getLogger("roundelay").warning("a rank has waited %.0f s for rank %d", seconds, rank)
