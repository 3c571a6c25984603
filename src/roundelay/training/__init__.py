"""Layer 7: train one model on many ranks; the strategy is one argument."""

from roundelay.training.ledger import ledger
from roundelay.training.loader import loader
from roundelay.training.prepare import prepare
from roundelay.training.state import full_state_dict
from roundelay.training.steps import accumulate, backward

__all__ = ["accumulate", "backward", "full_state_dict", "ledger", "loader", "prepare"]
