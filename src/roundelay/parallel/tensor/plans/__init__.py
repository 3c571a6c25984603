"""Plans that ship: a file for each model, found by listing, named as `plan=` takes them."""

from collections.abc import Mapping

from roundelay.registry import Family

__all__ = ["plans"]

plans: Family[Mapping[str, str]] = Family(__name__)
