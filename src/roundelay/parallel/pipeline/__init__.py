"""Pipeline parallel: stages of a model on ranks, and one executor that walks any schedule."""

from importlib.util import find_spec as _find_spec

from roundelay.errors import MissingPackageError as _MissingPackageError

if _find_spec("torch") is None:
    raise _MissingPackageError("roundelay.parallel.pipeline", "torch")

from roundelay.parallel.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
