"""The native core, as the engines on it share it."""

from roundelay import _core
from roundelay.engines._native.tables import check_tables

check_tables(_core)
