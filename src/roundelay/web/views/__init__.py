"""The views of the page: a file each, found by listing; each says which questions it answers."""

from roundelay.registry import Family
from roundelay.web.view import View

__all__ = ["views"]

views: Family[View] = Family("roundelay.web.views")
