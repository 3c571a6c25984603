"""Layers whose parameters every rank has, used on shards: their gradients are summed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.parallel import functions
from roundelay.parallel.passes import going_back, number_of
from roundelay.parallel.sharding import Sharding
from roundelay.parallel.tensor._layer import LayerPlan, become

__all__ = ["Norm", "summed"]


class Norm(LayerPlan):
    """Keep a norm whole. With sequence parallel it has this rank's tokens, so gradients are summed.

    `gather` makes its output the whole sequence again. `norm sharded` is one inside of attention,
    which has this rank's heads: its gradients are summed without sequence parallel, too.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"gather", "sharded"})

    def cuts(self) -> dict[str, Sharding]:
        """Cut nothing; refuse one that a region's gradients pass in parts."""
        words = self.place.words
        if {"gather", "sharded"} <= words:
            raise InvalidArgumentError(
                f"{self.place.label}: 'gather' is for shards of the sequence, and 'sharded' for "
                f"shards of heads or features; say one of them."
            )
        if self.place.inside and "sharded" not in words:
            raise InvalidArgumentError(
                f"{self.place.label} lies in a 'region' of the plan, where every rank has its own "
                f"heads or features: say 'norm sharded'."
            )
        return {}

    def apply(self, cuts: Mapping[str, Sharding]) -> None:
        """Have gradients summed, where ranks compute with different activations."""
        del cuts
        if self.axis.comm.size > 1 and (self.axis.dim is not None or "sharded" in self.place.words):
            become(self.place.module, NormForward, self)

    def check(self, x: Any) -> None:
        """Refuse a whole sequence, where a shard is expected."""
        if "sharded" not in self.place.words and isinstance(x, torch.Tensor):
            self.axis.expect_shard(x, self.place.label)

    def summed(self, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views of its parameters, whose gradients are summed over ranks."""
        return tuple(
            functions.by(self.place.label, view) for view in summed(self.axis.comm, *parameters)
        )

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, whole if the plan says so."""
        return self.axis.gather(x, self.place.label) if "gather" in self.place.words else x


class NormForward(nn.Module):
    """The forward of a layer on shards: with its own parameters, but for their gradients."""

    tensor_plan: Norm

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Compute with views of the parameters."""
        plan = self.tensor_plan
        plan.check(inputs[0] if inputs else next(iter(options.values()), None))
        own = {key: value for key, value in self._parameters.items() if value is not None}
        views: Any = dict(zip(own, plan.summed(*own.values()), strict=True))
        self._parameters.update(views)
        try:
            return plan.leave(super().forward(*inputs, **options))
        finally:
            self._parameters.update(own)


def summed(comm: Communicator, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of some tensors, whose gradients are summed over ranks in one call."""
    apply: Any = _Summed.apply  # Any: torch's is not typed
    views: tuple[torch.Tensor, ...] = apply(comm, *tensors)
    return views


class _Summed(torch.autograd.Function):
    """Views of some tensors; their gradients are those of all ranks, summed in one call."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.crossing, ctx.comm, ctx.number = "summed", comm, number_of(comm)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flat = torch.cat([grad.flatten() for grad in grads])
        layer = getattr(ctx, "layer", "")
        with going_back("a norm on shards", ctx.comm, ctx.number, layer) as ranks:
            total = functions.reduce(flat, ranks)
        parts = torch.split(total, [grad.numel() for grad in grads])
        # Apart in memory: torch counts what is written into views of one tensor together.
        return None, *(part.view_as(grad).clone() for part, grad in zip(parts, grads, strict=True))
