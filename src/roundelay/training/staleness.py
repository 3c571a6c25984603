"""`rd.staleness`: how old the gradients were that a parameter server applied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.planning.clock import staleness_bound
from roundelay.training._run import run_of
from roundelay.training.strategies.parameter_server.worker import Worker

__all__ = ["Staleness", "staleness"]

WIDTH = 40  # of the longest bar


@dataclass(frozen=True, slots=True)
class Staleness:
    """How many gradients missed how many updates: those made after their parameters were taken.

    >>> print(Staleness({0: 2, 3: 1}, bound=5))
    updates missed   gradients
                 0           2  ████████████████████████████████████████
                 3           1  ████████████████████
    mean 1.00, most 3; never more than 5
    """

    counts: Mapping[int, int]
    bound: int | None  # that no gradient can exceed; None: there is none

    @property
    def mean(self) -> float:
        """The mean over all gradients."""
        return sum(age * count for age, count in self.counts.items()) / max(1, self.total)

    @property
    def most(self) -> int:
        """The oldest one's."""
        return max(self.counts, default=0)

    @property
    def total(self) -> int:
        """How many gradients there were."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        longest = max(self.counts.values(), default=1)
        bars = [
            f"{age:14}{count:12}  {'█' * max(1, round(WIDTH * count / longest))}"
            for age, count in sorted(self.counts.items())
        ]
        limit = "no bound" if self.bound is None else f"never more than {self.bound}"
        last = f"mean {self.mean:.2f}, most {self.most}; {limit}"
        return "\n".join(["updates missed   gradients", *bars, last])


def staleness(model: torch.nn.Module) -> Staleness:
    """Return the staleness of all workers' gradients so far. Every worker calls it.

    With several servers, a gradient counts with the largest that any of them has measured.
    """
    run = run_of("staleness", model)
    state = run.state
    if not isinstance(state, Worker):
        raise InvalidArgumentError(
            f"staleness is for strategies ps, ps-async and ps-ssp; "
            f"{type(run.strategy).__name__} has none: every gradient is applied at once."
        )
    counts: Counter[int] = Counter()
    state.rest()
    state.meet()
    for theirs in run.comm.all_gather_object(sorted(state.staleness.items())):
        counts.update(dict(theirs))
    state.pull()
    options = state.options
    bound = 0 if options.mode == "sync" else None
    if options.bound is not None:
        bound = staleness_bound(state.everyone.size, options.bound)
    return Staleness(dict(sorted(counts.items())), bound)
