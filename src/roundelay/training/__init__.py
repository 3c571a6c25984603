"""Layer 7: train one model on many ranks; the strategy is one argument."""

from importlib.util import find_spec as _find_spec

from roundelay.errors import MissingPackageError as _MissingPackageError

if _find_spec("torch") is None:
    raise _MissingPackageError("roundelay.training", "torch")

from roundelay.training.ledger import ledger
from roundelay.training.loader.build import loader
from roundelay.training.prepare import prepare
from roundelay.training.state import full_state_dict
from roundelay.training.steps import accumulate, backward

__all__ = ["accumulate", "backward", "full_state_dict", "ledger", "loader", "prepare"]
