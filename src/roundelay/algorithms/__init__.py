"""Layer 4: how each collective can be done; one pure function per file, `size -> transfers`."""

from roundelay.algorithms._base import Algorithm, implements
from roundelay.registry import Family

__all__ = ["Algorithm", "algorithms", "implements"]

algorithms: Family[Algorithm] = Family(__name__)
