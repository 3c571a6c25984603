"""The gradients at a parameter server: where they lie, what is made of them, and the update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from roundelay.training.optimizer.joined import JoinedOptimizers
from roundelay.training.strategies.parameter_server._messages import ServerRequest
from roundelay.training.strategies.parameter_server._server_optimizer import Options
from roundelay.training.strategies.parameter_server.aggregate import (
    OwnAggregate,
    aggregate_own,
    fold_in_order,
)
from roundelay.training.strategies.parameter_server.share import Share


@dataclass(frozen=True, slots=True)
class UpdateRules:
    """What a server does with gradients."""

    aggregate: str | OwnAggregate  # "mean", "sum" or the user's own
    together: bool  # whether gradients wait for those of all workers
    bound: int | None = None  # steps that a worker may be ahead of the slowest; None: any number


@dataclass(frozen=True, slots=True)
class Updates:
    """What a server needs to update parameters itself."""

    values: list[torch.Tensor]  # the buffers in which the parameters live
    parameters: list[torch.Tensor]  # views of these
    optimizer: JoinedOptimizers
    options: Options


class ServerGradients:
    """Those that have come, their aggregate, and what steps on it, if anything does here."""

    def __init__(
        self,
        share: Share,
        names: Sequence[str],
        rules: UpdateRules,
        updates: Updates | None,
        workers: int,
    ) -> None:
        self._share, self._names, self._how = share, list(names), rules.aggregate
        self._updates = updates
        # Gradients that wait for others need a place each; those applied at once need one for all.
        self.inboxes = [share.make() for _ in range(workers if rules.together else 1)]
        self.aggregates = share.make() if rules.together else self.inboxes[0]
        self._views = share.views(self.aggregates)
        self.ever_used = [False] * len(share.indexes)  # parameters that were stepped on
        self.version = 0  # of the parameters

    def aggregate(self, *, weighed: bool) -> None:
        """Make one gradient of all workers'."""
        how = self._how
        if callable(how):
            each = [self._share.views(inbox) for inbox in self.inboxes]
            for number, name in enumerate(self._names):
                aggregate_own(how, [one[number] for one in each], self._views[number], name)
            return
        for number, buffer in enumerate(self.aggregates):
            sources = [inbox[number] for inbox in self.inboxes]
            fold_in_order(sources, buffer, mean=how == "mean" and not weighed)

    def aggregate_one(self) -> None:
        """Make of one worker's gradient what the user's own aggregate makes of it."""
        if callable(self._how):
            for name, grad in zip(self._names, self._views, strict=True):
                aggregate_own(self._how, [grad.clone()], grad, name)

    def multiply(self, factors: Iterable[float], scales: Iterable[float]) -> None:
        """Multiply all of them, and then each by its own."""
        for factor in factors:
            for buffer in self.aggregates:
                buffer.mul_(factor)
        for grad, scale in zip(self._views, scales, strict=True):
            if scale != 1.0:
                grad.mul_(scale)

    def norms(self, norm_type: float) -> list[float]:
        """Return the norm of each parameter's."""
        return [float(torch.linalg.vector_norm(view, norm_type)) for view in self._views]

    def clamp(self, value: float, used: Sequence[float]) -> None:
        """Cut every element of those that are used."""
        for grad, one in zip(self._views, used, strict=True):
            if one:
                grad.clamp_(-value, value)

    def update(self, request: ServerRequest) -> int:
        """Step on the gradients that lie ready; return the new version."""
        updates = self._updates
        if updates is None:
            return self.version
        updates.options.write(request.options, updates.optimizer)
        for parameter, grad, used in zip(
            updates.parameters, self._views, request.used, strict=True
        ):
            parameter.grad = grad.to(parameter.dtype) if used else None
        pairs = zip(self.ever_used, request.used, strict=True)
        self.ever_used = [ever or bool(used) for ever, used in pairs]
        there = [parameter.data for parameter in updates.parameters]
        updates.optimizer.all[request.place].step()
        for parameter, place in zip(updates.parameters, there, strict=True):
            parameter.grad = None  # which may be a copy
            if parameter.data_ptr() != place.data_ptr():  # an optimizer that sets `p.data`
                place.copy_(parameter)
                parameter.data = place
        self.version += 1
        return self.version
