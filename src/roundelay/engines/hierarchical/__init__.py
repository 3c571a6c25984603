"""Shared memory inside every host, and another library between them."""

from roundelay.engines.hierarchical.engine import Hierarchical

__all__ = ["Hierarchical"]
