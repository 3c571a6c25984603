"""Gradients that count as much as their rows, where micro-batches have different numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from roundelay.training._step import StepState


def weighed(parameter: torch.Tensor, step: StepState) -> Any:  # Any: torch's handle
    """Have what backward passes add to a parameter's gradient multiplied by the step's factor."""

    def weigh(grad: torch.Tensor) -> torch.Tensor | None:
        factor = step.factor
        if factor == 1 or not kept(parameter):
            return None
        # A mean over no rows is NaN.
        return grad * factor if factor else torch.zeros_like(grad)

    return parameter.register_hook(weigh)  # type: ignore[no-untyped-call]


def kept(parameter: torch.Tensor) -> bool:
    """Tell a backward pass from `torch.autograd.grad`, whose results are the caller's own."""
    try:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as in _zero_away
            node = get_gradient_edge(parameter).node
        return bool(torch._C._will_engine_execute_node(node))  # noqa: SLF001 - as torch's own hooks
    except RuntimeError:
        return False
