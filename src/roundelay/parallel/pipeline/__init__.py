"""Pipeline parallel: stages of a model on ranks, and one executor that walks any schedule."""

from roundelay.parallel.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
