"""Ranks as processes with a GPU each, which NCCL connects."""

from roundelay.engines.nccl.engine import Nccl

__all__ = ["Nccl"]
