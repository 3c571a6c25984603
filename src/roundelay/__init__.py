"""Collective communication and data-parallel training, where every algorithm is data."""

from importlib.metadata import version as _version

from roundelay.errors import RoundelayError

__all__ = ["RoundelayError", "__version__"]

__version__ = _version("roundelay")
