"""Layer 4: how each collective can be done; one pure function per file, `size -> transfers`."""

from roundelay.algorithms._base import Algorithm, implements
from roundelay.algorithms._find import (
    algorithm_of,
    algorithms,
    algorithms_of,
    collective_called,
    collective_or_algorithm,
    default_algorithm,
)

__all__ = [
    "Algorithm",
    "algorithm_of",
    "algorithms",
    "algorithms_of",
    "collective_called",
    "collective_or_algorithm",
    "default_algorithm",
    "implements",
]
