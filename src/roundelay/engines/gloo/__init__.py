"""Ranks as processes that Gloo connects, PyTorch's library for CPUs; on one host or on many."""

from roundelay.engines.gloo.engine import Gloo

__all__ = ["Gloo"]
