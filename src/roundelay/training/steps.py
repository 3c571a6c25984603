"""`rd.accumulate` and `rd.backward`: steps of several micro-batches, and losses that weigh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from roundelay.arguments import shown
from roundelay.errors import InvalidArgumentError
from roundelay.training._run import latest_run, run_of

__all__ = ["accumulate", "backward"]


@contextmanager
def accumulate(model: torch.nn.Module) -> Iterator[None]:
    """Have backward passes inside only add up gradients; the next one outside brings them together.

    The same under every strategy: k micro-batches are k - 1 inside and the last one outside.
    """
    run = run_of("accumulate", model)
    before = run.arrivals.accumulating
    run.arrivals.accumulating = True
    try:
        yield
    finally:
        run.arrivals.accumulating = before


def backward(
    loss_sum: torch.Tensor, *, weight: float, model: torch.nn.Module | None = None
) -> None:
    """Run backward on a sum of losses, so that the step uses their exact mean.

    `weight` is how many terms the sum has, tokens for example. The gradient of the step is that of
    the sum of all losses over the sum of all weights, over ranks and micro-batches alike, however
    unevenly they are spread.
    """
    run = latest_run("backward") if model is None else run_of("backward", model)
    try:
        total = float(weight)
    except (TypeError, ValueError, RuntimeError):
        total = math.nan
    if not 0 <= total < math.inf:
        raise InvalidArgumentError(f"backward takes a weight from 0, not {shown(weight)}.")
    run.setup.weights.used = True
    run.setup.weights.total += total
    scaler = run.setup.scaler
    loss = loss_sum if scaler is None else scaler.apply(loss_sum)
    loss.backward()  # type: ignore[no-untyped-call]
