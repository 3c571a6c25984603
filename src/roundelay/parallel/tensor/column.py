"""Column parallel: every rank has some of a linear layer's outputs, from the whole input."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import mul
from typing import Any, ClassVar

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.parallel import functions
from roundelay.parallel._cut import CutDim
from roundelay.parallel.cut_tensor import CutSource
from roundelay.parallel.sharding import Sharding
from roundelay.parallel.tensor._layer import (
    WHOLE,
    LayerPlan,
    become,
    is_conv1d,
    resize,
    weight_of,
)
from roundelay.parallel.tensor.norm import summed

__all__ = ["Column"]


class Column(LayerPlan):
    """Cut the outputs. `gather` makes them whole again; without it forward sends nothing.

    `column:head_dim` keeps so many outputs together: those of a head. `column:head_dim shared` is
    for keys and values, `column:head_dim*groups shared` for their queries: where there are fewer
    heads of keys than ranks, each is computed by the ranks that have its queries. The weight then
    stays whole on all ranks, and its gradient is summed.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"gather", "shared", "whole"})
    argued = True
    parts: list[int]  # outputs of every rank
    outputs: slice | None = None  # of a head that ranks share
    features: int  # inputs
    source: CutSource

    def cuts(self) -> dict[str, Sharding]:
        """Cut weight and bias alike; nothing where several ranks share a head."""
        dim = 1 if is_conv1d(self.place.module) else 0
        features = weight_of(self.place, type(self).__name__.lower()).size(dim)
        if self._head(features) is not None:
            return {}
        blocks = self.blocks(features)
        found = {"weight": self.sharding(dim, blocks)}
        if getattr(self.place.module, "bias", None) is not None:
            found["bias"] = self.sharding(0, blocks)
        return found

    def blocks(self, features: int) -> list[list[int]]:
        """Return what every rank has of each block of outputs; here all are one block."""
        return [self.counts(features, self.unit())]

    def _head(self, features: int) -> slice | None:
        """Return the outputs of the head that this rank shares with others; None for its own."""
        width = self.unit()
        if features % width or len(self.factors()) != 1:
            return None
        share = self.ranks_per_unit(features // width)
        if share == 1:
            return None
        if "gather" in self.place.words or is_conv1d(self.place.module):
            raise InvalidArgumentError(
                f"{self.place.label} has {features // width} heads, which the "
                f"{self.axis.comm.size} ranks of {self.axis.name} share: 'shared' takes nn.Linear, "
                f"without 'gather'."
            )
        first = self.axis.comm.rank // share * width
        return slice(first, first + width)

    def apply(self, cuts: Mapping[str, Sharding]) -> None:
        """Have the layer bring its input in."""
        if not cuts:
            weight = weight_of(self.place, "column")
            self.features, self.outputs = weight.size(1), self._head(weight.size(0))
            self.source = self._source(((self.unit(),) * self.axis.comm.size,))
            become(self.place.module, SharedForward, self)
            return
        self._divide_groups(sum(cuts["weight"].counts))
        self.parts = cuts["weight"].counts
        self.features = weight_of(self.place, "column").size(1 - cuts["weight"].dim)
        resize(self.place.module, outputs=self.parts[self.axis.comm.rank])
        pieces = cuts["weight"].pieces
        blocks = tuple(
            tuple(stop - start for start, stop in each) for each in zip(*pieces, strict=True)
        )
        self.source = self._source(blocks)
        become(self.place.module, ColumnForward, self)

    def _source(self, blocks: tuple[tuple[int, ...], ...]) -> CutSource:
        """Return what marks outputs, of which every rank has so many in each block."""
        around = next((name for name, _ in self.place.parents if name in self.axis.counted), None)
        cut = CutDim(
            -1,
            blocks[0],
            self.axis.comm.rank,
            outer=len(blocks),
            blocks=blocks if len(blocks) > 1 else (),
            units=tuple(accumulate(self.factors(), mul)),
            counted=self.axis.counted.get(around, frozenset()),
        )
        return CutSource(self.place.label, self.axis, cut)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input, with gradients that add up over ranks."""
        place = self.place
        self.expect_features(x, self.features, WHOLE)
        if place.inside:
            return x
        if "gather" not in place.words:
            self.axis.draw_apart(x, place.label, training=place.module.training)
        return self.axis.enter(x, place.label, whole=self.whole)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs, whole if the plan says so."""
        if "gather" not in self.place.words:
            return self.source.marked(x, training=self.place.module.training)
        whole = functions.gather(x, self.axis.comm, x.dim() - 1, self.parts)
        return functions.by(self.place.label, whole)

    def _divide_groups(self, features: int) -> None:
        """Have the module that counts queries for each head of keys count those of this rank."""
        share = self.ranks_per_unit(features // self.unit())
        name = self.place.argument.split("*")[-1].strip()
        for _, module in self.place.parents if share > 1 else ():
            value = getattr(module, name, None)
            if isinstance(value, int):
                setattr(module, name, value // share)
                return


class SharedForward:
    """The forward of a layer of keys or values, of which this rank has a head with others."""

    tensor_plan: Column

    def forward(self, x: torch.Tensor, /) -> torch.Tensor:
        """Compute the outputs of one head."""
        plan, own = self.tensor_plan, vars(self)["_parameters"]
        given = [value for value in (own["weight"], own.get("bias")) if value is not None]
        views = summed(plan.axis.comm, *given)
        x = torch.nn.functional.linear(plan.enter(x), *(view[plan.outputs] for view in views))
        return plan.leave(x)


class ColumnForward:
    """The forward of a layer whose outputs are cut."""

    tensor_plan: Column

    def forward(self, x: torch.Tensor, /) -> torch.Tensor:
        """Compute this rank's outputs."""
        plan = self.tensor_plan
        own: Any = super()  # the layer's class, which a mixin does not know
        return plan.leave(own.forward(plan.enter(x)))
