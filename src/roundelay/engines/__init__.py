"""Layer 5: engines run calls on buffers; one file or folder each, and none knows an algorithm."""

from collections.abc import Sequence

from roundelay.engines._base import Engine
from roundelay.engines._call import (
    AXIS,
    COLLECTIVES,
    ENDINGS,
    INNER_TAGS,
    WIRED,
    WIRES,
    Arena,
    CollectiveCall,
    FastPath,
    MessageCall,
    MessageRequest,
    OwnedMemory,
    Request,
    no_fast_path,
    wire_name,
)
from roundelay.engines._device_arrays import DeviceArray
from roundelay.engines._inputs import ScheduleBuffer
from roundelay.engines._run_schedule import ScheduleRunner
from roundelay.engines._selector import Candidates, ScheduleFor, Select, Selector, SizeClass
from roundelay.reductions import Op
from roundelay.registry import Family, class_name
from roundelay.schedule import Schedule

__all__ = [
    "AXIS",
    "COLLECTIVES",
    "ENDINGS",
    "INNER_TAGS",
    "WIRED",
    "WIRES",
    "Arena",
    "Candidates",
    "CollectiveCall",
    "DeviceArray",
    "Engine",
    "FastPath",
    "MessageCall",
    "MessageRequest",
    "OwnedMemory",
    "Request",
    "ScheduleBuffer",
    "ScheduleFor",
    "ScheduleRunner",
    "Select",
    "Selector",
    "SizeClass",
    "engines",
    "no_fast_path",
    "run_schedule",
    "wire_name",
]


engines: Family[type[Engine]] = Family(__name__, public=class_name)


def run_schedule(
    schedule: Schedule,
    inputs: Sequence[ScheduleBuffer | None],
    engine: str = "reference",
    *,
    op: str | Op = "sum",
    counts: Sequence[int] | None = None,
) -> list[ScheduleBuffer | None]:
    """Run a schedule on all its ranks; return each rank's output, flat.

    The ranks end with it; `engines.load(engine).runner()` keeps them for more schedules.
    """
    with engines.load(engine).runner() as runner:
        return runner.run(schedule, inputs, op=op, counts=counts)
