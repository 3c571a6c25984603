"""Parameter servers: workers push gradients and pull parameters."""

from roundelay.training.strategies.parameter_server.strategy import ParameterServer

__all__ = ["ParameterServer"]
