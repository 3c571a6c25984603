"""Expert parallel: experts divided between ranks; tokens travel to them and back."""

from importlib.util import find_spec as _find_spec

from roundelay.errors import MissingPackageError as _MissingPackageError

if _find_spec("torch") is None:
    raise _MissingPackageError("roundelay.parallel.expert", "torch")

from roundelay.parallel.expert.layer import MoE, average_gradients, balance_loss
from roundelay.parallel.expert.router import Router, Routing

__all__ = ["MoE", "Router", "Routing", "average_gradients", "balance_loss"]
