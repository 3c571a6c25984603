"""Shared memory inside every host, and another library between them."""

from roundelay.engines.hierarchical._join import Hierarchical

__all__ = ["Hierarchical"]
