"""Layer 5: engines run schedules on buffers; one file each, and none knows an algorithm."""

from roundelay.engines._base import ScheduleRunner
from roundelay.registry import Family

__all__ = ["ScheduleRunner", "engines"]


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


engines: Family[type[ScheduleRunner]] = Family(__name__, public=_class_name)
