"""Column parallel: every rank has some of a linear layer's outputs, from the whole input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from roundelay.parallel import functions
from roundelay.parallel.sharding import Sharding
from roundelay.parallel.tensor._layer import LayerPlan, become, is_conv1d, resize, weight_of

__all__ = ["Column"]


class Column(LayerPlan):
    """Cut the outputs. `gather` makes them whole again; without it forward sends nothing.

    `column:head_dim` keeps so many outputs together: those of a head.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"gather", "whole"})
    argued = True
    parts: list[int]  # outputs of every rank
    features: int  # inputs

    def cuts(self) -> dict[str, Sharding]:
        """Cut weight and bias alike."""
        dim = 1 if is_conv1d(self.place.module) else 0
        blocks = self.blocks(weight_of(self.place, type(self).__name__.lower()).size(dim))
        found = {"weight": self.sharding(dim, blocks)}
        if getattr(self.place.module, "bias", None) is not None:
            found["bias"] = self.sharding(0, blocks)
        return found

    def blocks(self, features: int) -> list[list[int]]:
        """Return what every rank has of each block of outputs; here all are one block."""
        return [self.counts(features, self.unit())]

    def apply(self, cuts: Mapping[str, Sharding]) -> None:
        """Have the layer bring its input in."""
        self.parts = cuts["weight"].counts
        self.features = weight_of(self.place, "column").size(1 - cuts["weight"].dim)
        resize(self.place.module, outputs=self.parts[self.axis.comm.rank])
        become(self.place.module, ColumnForward, self)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input, with gradients that add up over ranks."""
        place = self.place
        self.expect_features(x, self.features, "its whole input")
        return x if place.inside else self.axis.enter(x, place.label, whole=self.whole)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs, whole if the plan says so."""
        if "gather" not in self.place.words:
            return x
        return functions.gather(x, self.axis.comm, x.dim() - 1, self.parts)


class ColumnForward:
    """The forward of a layer whose outputs are cut."""

    tensor_plan: Column

    def forward(self, x: torch.Tensor, /) -> torch.Tensor:
        """Compute this rank's outputs."""
        plan = self.tensor_plan
        own: Any = super()  # the layer's class, which a mixin does not know
        return plan.leave(own.forward(plan.enter(x)))
