"""The router of a mixture of experts: which experts get a token, and with which weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from roundelay.arguments import index_of, shown
from roundelay.errors import InvalidArgumentError

__all__ = ["Queues", "Router", "Routing", "capacity_of"]


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one rank go: for each token its experts, best first."""

    experts: torch.Tensor  # [tokens, top_k], int64
    weights: torch.Tensor  # [tokens, top_k], of what each expert says
    probabilities: torch.Tensor  # [tokens, experts]

    def counts(self) -> torch.Tensor:
        """Return how often each expert is a token's first choice, its second, and so on."""
        top_k, experts = self.experts.shape[1], self.probabilities.shape[1]
        flat = self.experts + experts * torch.arange(top_k, device=self.experts.device)
        return torch.bincount(flat.reshape(-1), minlength=top_k * experts).view(top_k, experts)


class Router(nn.Module):
    """Give every token the `top_k` experts that a linear layer scores highest.

    Weights are the probabilities of the chosen experts, made to add up to 1 with `normalize`; that
    is the default for several, and for one it would leave the router without a gradient. Of
    experts that score alike the first is taken. Scores are computed in float32 at least.

    `capacity_factor` limits an expert to so many times its even share of all choices of all ranks;
    None drops nothing. See `kept_choices` for what is dropped.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        *,
        top_k: int = 2,
        capacity_factor: float | None = None,
        normalize: bool | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("width", width), ("experts", experts), ("top_k", top_k)):
            if (index_of(value) or 0) < 1:
                raise InvalidArgumentError(
                    f"Router needs a whole number above 0 as {name}, not {shown(value)}."
                )
        if top_k > experts:
            raise InvalidArgumentError(
                f"Router: a token can't have its best {top_k} of {experts} experts. "
                f"Take top_k={experts} or less."
            )
        if capacity_factor is not None and not _positive(capacity_factor):
            raise InvalidArgumentError(
                f"Router: capacity_factor is a number above 0, such as 1.25, or None to drop "
                f"nothing, not {shown(capacity_factor)}."
            )
        self.experts, self.top_k, self.capacity_factor = experts, top_k, capacity_factor
        self.normalize = top_k > 1 if normalize is None else bool(normalize)
        self.score = nn.Linear(width, experts, bias=False)

    def forward(self, tokens: torch.Tensor) -> Routing:
        """Return where `tokens` (one in each row) go."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            scores = nn.functional.linear(tokens.to(dtype), self.score.weight.to(dtype))
            probabilities = scores.softmax(-1)
        # A stable sort: topk says nothing about which of equals it takes.
        order = probabilities.detach().sort(dim=-1, descending=True, stable=True).indices
        experts = order[:, : self.top_k].contiguous()
        weights = probabilities.gather(1, experts)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts, weights.to(tokens.dtype), probabilities)

    def extra_repr(self) -> str:
        """Say what a printed model should show."""
        limit = "" if self.capacity_factor is None else f", capacity_factor={self.capacity_factor}"
        return f"experts={self.experts}, top_k={self.top_k}{limit}"


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def capacity_of(choices: int, experts: int, factor: float | None) -> int:
    """Return how many choices one expert takes; all of them where there is no limit.

    >>> capacity_of(100, 8, 1.25), capacity_of(100, 8, None)
    (16, 100)
    """
    return choices if factor is None else math.ceil(factor * choices / experts)


@dataclass(frozen=True)
class Queues:
    """All ranks' tokens in a queue at each expert, which takes those in front.

    Those that want it most stand first (it is their first choice, then their second), and among
    these the order is that of ranks and tokens. So what is dropped does not depend on the number
    of ranks.
    """

    counts: torch.Tensor  # [ranks, top_k, experts]: `Routing.counts` of every rank
    factor: float | None

    @property
    def capacity(self) -> int:
        """How many choices an expert takes."""
        return capacity_of(int(self.counts.sum()), self.counts.shape[2], self.factor)

    @property
    def before(self) -> torch.Tensor:
        """How many stand before the first of each rank and choice, at each expert."""
        total = self.counts.sum(0)
        return total.cumsum(0) - total + self.counts.cumsum(0) - self.counts

    def taken(self) -> torch.Tensor:
        """Return how many choices of each rank each expert takes."""
        if self.factor is None:
            return self.counts.sum(1)
        room = (self.capacity - self.before).clamp(min=0)
        return torch.minimum(room, self.counts).sum(1)

    def kept(self, routing: Routing, rank: int) -> torch.Tensor | None:
        """Return which choices of a rank's tokens are taken, None for all; others are dropped."""
        if self.factor is None:
            return None
        columns = []
        for choice, column in enumerate(routing.experts.unbind(1)):
            order = column.argsort(stable=True)
            own = self.counts[rank, choice]
            starts = (own.cumsum(0) - own)[column[order]]
            place = torch.empty_like(column)
            place[order] = torch.arange(len(column), device=column.device) - starts
            columns.append(place + self.before[rank, choice][column] < self.capacity)
        return torch.stack(columns, 1)
