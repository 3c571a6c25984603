"""The strategies: a file or folder each, found by listing; each says by which words it is known."""

from roundelay.registry import Family, class_name
from roundelay.training.strategy import Strategy

__all__ = ["strategies"]


strategies: Family[type[Strategy]] = Family(__name__, public=class_name)
