"""The strategies: a file or folder each, found by listing; each says by which words it is known."""

from roundelay.registry import Family
from roundelay.training.strategy import Strategy

__all__ = ["strategies"]


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


strategies: Family[type[Strategy]] = Family(__name__, public=_class_name)
