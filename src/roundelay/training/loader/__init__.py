"""`rd.loader`: a dataset in global batches, of which every rank gets its share."""

from roundelay.training.loader.build import loader
from roundelay.training.loader.micro_batches import Loader

__all__ = ["Loader", "loader"]
