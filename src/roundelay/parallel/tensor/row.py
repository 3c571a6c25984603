"""Row parallel: every rank has some of a linear layer's inputs, and the outputs are summed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from roundelay.parallel import functions
from roundelay.parallel.sharding import Sharding
from roundelay.parallel.tensor._layer import (
    LayerPlan,
    become,
    is_conv1d,
    product,
    resize,
    weight_of,
)

__all__ = ["Row"]


class Row(LayerPlan):
    """Cut the inputs, which come cut from a column-parallel layer; add the bias once, at the end.

    `row:head_dim` keeps so many inputs together, as the layer before did.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"shared", "whole"})
    argued = True
    parts: tuple[int, ...]  # inputs of every rank
    features: int  # those of this one

    def cuts(self) -> dict[str, Sharding]:
        """Cut the weight; every rank has the bias."""
        dim = 0 if is_conv1d(self.place.module) else 1
        features = weight_of(self.place, "row").size(dim)
        return {"weight": self.sharding(dim, [self.counts(features, self.unit())])}

    def apply(self, cuts: Mapping[str, Sharding]) -> None:
        """Have the layer sum its outputs."""
        self.parts = tuple(cuts["weight"].counts)
        self.features = self.parts[self.axis.comm.rank]
        resize(self.place.module, inputs=self.features)
        become(self.place.module, RowForward, self)

    def add(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the outputs of all ranks together, with the bias."""
        total = self.axis.leave(x, self.place.label, whole=self.whole)
        if bias is None:
            return total
        if self.axis.dim is not None and not self.whole:  # each rank adds it to its own tokens
            bias = functions.copy(bias, self.axis.comm)
        return total + bias.to(total.dtype)  # which autocast may have made smaller


class RowForward(nn.Module):
    """The forward of a layer whose inputs are cut."""

    tensor_plan: Row
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor, /) -> torch.Tensor:
        """Compute with this rank's inputs, then with all of them."""
        plan = self.tensor_plan
        plan.expect_features(
            x, plan.features, f"this rank's part of its input along {plan.axis.name}"
        )
        x = plan.axis.taken(x, plan.parts, plan.place.label)
        return plan.add(product(x, self), self.bias)
