"""Layer 5: engines run calls on buffers; one folder each, and none knows an algorithm."""

from roundelay.engines._base import (
    AXIS,
    COLLECTIVES,
    ENDINGS,
    INNER_TAGS,
    Buffer,
    CollectiveCall,
    Engine,
    MessageRequest,
    Request,
    ScheduleFor,
    Select,
    Selection,
    SizeClass,
)
from roundelay.engines._harness import Harness
from roundelay.registry import Family

__all__ = [
    "AXIS",
    "COLLECTIVES",
    "ENDINGS",
    "INNER_TAGS",
    "Buffer",
    "CollectiveCall",
    "Engine",
    "Harness",
    "MessageRequest",
    "Request",
    "ScheduleFor",
    "Select",
    "Selection",
    "SizeClass",
    "engines",
]


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


engines: Family[type[Harness]] = Family(__name__, public=_class_name)
