"""Dropout: one mask for activations that all ranks have, masks of their own for shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from roundelay.errors import InvalidArgumentError
from roundelay.parallel.cut_tensor import unmarked
from roundelay.parallel.sharding import Sharding
from roundelay.parallel.tensor._layer import LayerPlan, become
from roundelay.training.fingerprint import mark_of

__all__ = ["Dropout"]

SEEDS = 2**62


class Dropout(LayerPlan):
    """Draw masks that fit. `dropout` is between cut layers, `dropout sharded` inside of them.

    Between them all ranks draw from the first one's seed, which costs a broadcast of eight bytes;
    with sequence parallel, and inside, each draws from its own. Seeds come from torch's random
    numbers, so that what is computed again for a checkpointed block has the same mask.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"sharded", "whole"})
    _seen = False  # whether ranks have compared what comes in

    def cuts(self) -> dict[str, Sharding]:
        """Cut nothing; refuse what is no dropout."""
        module = self.place.module
        if type(module).forward is not nn.Dropout.forward:
            raise InvalidArgumentError(
                f"{self.place.label} is a {type(module).__name__}, and 'dropout' takes nn.Dropout. "
                f"With 'replicate' it draws from torch's random numbers: seed them alike on all "
                f"ranks of {self.axis.name}."
            )
        return {}

    def apply(self, cuts: Mapping[str, Sharding]) -> None:
        """Have the layer draw its own masks."""
        del cuts
        if self.axis.comm.size > 1:
            become(self.place.module, DropoutForward, self)

    def expect_shard(self, x: torch.Tensor) -> None:
        """Refuse, the first time, a shard that is the same on all ranks: they would go on apart."""
        if self._seen or "sharded" not in self.place.words or x.numel() == 0:
            return
        self._seen, comm, x = True, self.axis.comm, unmarked(x)
        mark = int(mark_of(x.detach().contiguous().reshape(-1)))
        every = comm.all_gather(np.array([mark, bool((x == x.flatten()[0]).all())], np.int64))
        if len({*every[:, 0].tolist()}) == 1 and not every[:, 1].any():
            raise InvalidArgumentError(
                f"{self.place.label} is 'dropout sharded' in the plan, which is for activations of "
                f"which every rank of {self.axis.name} has its own part, and all {comm.size} ranks "
                f"have the same ones there: each would go on with another mask. Say 'dropout'."
            )

    def generator(self, device: torch.device) -> torch.Generator:
        """Return random numbers: the same on all ranks, or others on each."""
        seed = torch.randint(SEEDS, (1,))
        comm = self.axis.comm
        sharded = "sharded" in self.place.words or (self.axis.dim is not None and not self.whole)
        if not sharded:
            seed = comm.broadcast(seed.to(device))
        own = int(seed) ^ (comm.rank if sharded else 0)
        return torch.Generator(device).manual_seed(own)


class DropoutForward:
    """The forward of a dropout whose masks are drawn for shards, or for all ranks."""

    tensor_plan: Dropout
    training: bool
    p: float

    def forward(self, x: torch.Tensor, /) -> torch.Tensor:
        """Zero some, and scale the rest."""
        if not self.training or self.p in (0, 1):
            own: Any = super()  # the layer's class, which a mixin does not know
            kept: torch.Tensor = own.forward(x)
            return kept
        self.tensor_plan.expect_shard(x)
        generator = self.tensor_plan.generator(x.device)
        mask = torch.empty_like(x).bernoulli_(1 - self.p, generator=generator)
        return x * mask.div_(1 - self.p)
