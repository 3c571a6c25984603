"""Ranks as processes with a GPU each, which NCCL connects."""

from __future__ import annotations

from typing import Any, Literal

from roundelay.engines._over_messages import Post
from roundelay.engines.gloo import Gloo
from roundelay.engines.gloo.engine import GlooEngine
from roundelay.engines.gloo.groups import Schedules, load_torch
from roundelay.engines.nccl.engine import NcclEngine
from roundelay.errors import InvalidArgumentError
from roundelay.rendezvous.by_store import StoreRendezvous

__all__ = ["Nccl"]


class Nccl(Gloo):
    """Runs a schedule over NCCL's sends and receives, one process of this host per GPU.

    With `library="gloo"` the same code runs on CPUs, for machines that have no GPU.

    >>> import numpy as np
    >>> from roundelay.algorithms import algorithms
    >>> ring = algorithms.load("all_reduce_ring").schedule(2)
    >>> with Nccl(library="gloo") as engine:
    ...     engine.run(ring, [np.array([r, r]) for r in (1, 2)])[0]
    array([3, 3])
    """

    engine = NcclEngine

    @classmethod
    def can(cls, what: Literal["start", "join"]) -> bool:
        """Tell that launchers start these ranks: each must have its own GPU."""
        return what == "join"

    def __init__(self, *, library: str = "nccl") -> None:
        super().__init__()
        self._library = library

    def check(self, size: int) -> None:
        """Refuse more ranks than there are GPUs: NCCL takes one rank for each."""
        if self._library != "nccl":
            return
        torch: Any = load_torch("nccl")
        count = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
        if size > count:
            raise InvalidArgumentError(
                f"The engine nccl needs a GPU for each of the {size} ranks, but this host has "
                f"{count} that torch can use. Use engine gloo, or fewer ranks."
            )

    def connect(
        self, rendezvous: StoreRendezvous, schedules: Schedules, timeout: float
    ) -> tuple[GlooEngine, Post]:
        """Return the end of a rank, and what posts the transfers of its schedules."""
        if self._library == "nccl":
            load_torch("nccl").cuda.set_device(rendezvous.rank)
        engine = NcclEngine(rendezvous, schedules, timeout=timeout, library=self._library)
        return engine, engine.device_slot
