"""Tensor and sequence parallel: weights cut between ranks, by a plan that says which and how."""

from importlib.util import find_spec as _find_spec

from roundelay.errors import MissingPackageError as _MissingPackageError

if _find_spec("torch") is None:
    raise _MissingPackageError("roundelay.parallel.tensor", "torch")
