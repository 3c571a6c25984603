"""Vocabulary parallel: every rank has the rows of some tokens, and the others' come as a sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from roundelay.errors import InvalidArgumentError
from roundelay.parallel.sharding import Sharding
from roundelay.parallel.tensor._layer import LayerPlan, become, own_parameter

__all__ = ["Embedding"]


class Embedding(LayerPlan):
    """Cut the vocabulary, as evenly as it goes."""

    takes: ClassVar[frozenset[str]] = frozenset({"whole"})
    start: int  # this rank's first token, and the first of the next one
    stop: int
    tokens: int  # in the vocabulary

    def cuts(self) -> dict[str, Sharding]:
        """Cut the rows."""
        module: Any = self.place.module  # Any: its attributes are checked here
        if type(module).forward is not nn.Embedding.forward:
            raise InvalidArgumentError(
                f"{self.place.label} is a {type(module).__name__}, and 'embedding' takes "
                f"nn.Embedding."
            )
        for option in ("max_norm", "scale_grad_by_freq"):
            if getattr(module, option):
                raise InvalidArgumentError(
                    f"{self.place.label} has {option}, which looks at all rows or tokens at once. "
                    f"Leave it out, or say 'replicate'."
                )
        weight = own_parameter(self.place, "weight")
        return {"weight": self.sharding(0, [self.counts(weight.size(0), 1)])}

    def apply(self, cuts: Mapping[str, Sharding]) -> None:
        """Have the layer look up its own rows."""
        counts, rank = cuts["weight"].counts, self.axis.comm.rank
        self.start, self.tokens = sum(counts[:rank]), sum(counts)
        self.stop = self.start + counts[rank]
        module: Any = self.place.module
        module.num_embeddings = counts[rank]
        if module.padding_idx is not None:
            here = self.start <= module.padding_idx < self.stop
            module.padding_idx = module.padding_idx - self.start if here else None
        become(module, EmbeddingForward, self)

    def elsewhere(self, tokens: torch.Tensor) -> torch.Tensor:
        """Say which tokens other ranks have; who has none is left for torch to refuse."""
        before = (tokens >= 0) & (tokens < self.start)
        return before | ((tokens >= self.stop) & (tokens < self.tokens))

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return every token's row, or those of this rank's shard of the sequence."""
        if not self.whole:
            self.axis.began(x, self.place.label)
        return self.axis.leave(x, self.place.label, whole=self.whole)


class EmbeddingForward:
    """The forward of an embedding whose rows are cut."""

    tensor_plan: Embedding

    def forward(self, tokens: torch.Tensor, /) -> torch.Tensor:
        """Look up what is here, zero for the rest, and sum."""
        plan = self.tensor_plan
        elsewhere = plan.elsewhere(tokens)
        own: Any = super()  # the layer's class, which a mixin does not know
        rows = own.forward((tokens - plan.start).masked_fill(elsewhere, 0))
        return plan.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0))
