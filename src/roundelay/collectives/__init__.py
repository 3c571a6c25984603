"""Layer 1: what every rank holds before and after each collective; nothing of how."""

from roundelay.collectives._base import Collective, letter
from roundelay.registry import Family

__all__ = ["Collective", "collectives", "letter"]

collectives: Family[Collective] = Family(__name__)
