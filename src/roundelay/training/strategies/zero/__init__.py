"""ZeRO: optimizer state, gradients and parameters divided between the ranks."""

from roundelay.training.strategies.zero.strategy import Zero

__all__ = ["Zero"]
