"""Where to cut a sequence of modules into stages, so that the dearest one is least dear."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from roundelay.errors import InvalidArgumentError

ROUNDS = 3  # of measuring; the shortest counts


def balanced(costs: Sequence[float], weighs: Sequence[bool], parts: int) -> list[int]:
    """Return where each part starts, each with something that weighs; the dearest is least dear.

    >>> balanced([1, 1, 1, 1, 4], [True] * 5, 2)
    [0, 4]
    >>> balanced([5, 0, 0, 5], [True, False, False, True], 2)
    [0, 1]
    """
    count = len(costs)
    sums, heavy = [0.0], [0]
    for cost, weighty in zip(costs, weighs, strict=True):
        sums.append(sums[-1] + cost)
        heavy.append(heavy[-1] + weighty)
    # best[end]: the cost of the dearest part, and where the last part starts, up to there.
    best = [(sums[end] if heavy[end] else float("inf"), 0) for end in range(count + 1)]
    chosen = [best]
    for part in range(1, parts):
        best = [
            min(
                ((max(chosen[-1][start][0], sums[end] - sums[start]), start)
                 for start in range(part, end) if heavy[end] > heavy[start]),
                default=(float("inf"), 0),
            )
            for end in range(count + 1)
        ]  # fmt: skip
        chosen.append(best)
    if chosen[-1][count][0] == float("inf"):
        raise InvalidArgumentError(
            f"Pipeline needs {parts} stages that have parameters, and the model calls "
            f"{sum(weighs)} modules that have some, one after the other. Take fewer stages, or "
            f"more layers."
        )
    starts, end = [], count
    for best in reversed(chosen):
        end = best[end][1]
        starts.append(end)
    return starts[::-1]


def module_seconds(model: nn.Module, graph: fx.Graph, sample: Sequence[Any]) -> dict[str, float]:
    """Return how long each module takes on a sample: forward, as nobody looks at gradients."""
    took: dict[str, float] = {}

    class Timed(fx.Interpreter):
        def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
            began = time.perf_counter()
            result = super().call_module(target, args, kwargs)
            spent[target] = spent.get(target, 0.0) + time.perf_counter() - began
            return result

    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad(), torch.random.fork_rng():
        for _ in range(ROUNDS):
            spent: dict[str, float] = {}
            Timed(model, graph=graph).run(*sample)
            took = {name: min(took.get(name, seconds), seconds) for name, seconds in spent.items()}
        for buffer, value in before:  # as norms count their passes
            buffer.copy_(value)
    return took
